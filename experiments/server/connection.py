"""A connection that ends when its client does not read."""

import asyncio
import logging
import socket
import struct
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_LOGGER = logging.getLogger(__name__)
_AT_ONCE = struct.pack("ii", 1, 0)  # linger: on, for 0 seconds


class Connection(AutoHTTPProtocol):  # type: ignore
    """Gives its client a time to read what it is sent, and else ends, with all that is unread.

    A connection that is only closed stays until its client has read, if need be for ever.

    Args:
      seconds: The time.
      arguments: Of uvicorn's protocol.
    """

    _transport: Any
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *, seconds: float, **arguments: Any):
        super().__init__(**arguments)
        self._seconds = seconds

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(0)  # so that writing pauses until all is read
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def resume_writing(self) -> None:
        self._stop_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        host, port = self._transport.get_extra_info("peername")[:2]
        _LOGGER.warning("%s:%d did not read for %g seconds: its connection ends", host, port, self._seconds)
        # Closed without it, the system would go on to offer what it holds itself.
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()
