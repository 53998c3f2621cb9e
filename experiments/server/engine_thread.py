"""The thread that owns the engine: whatever touches the engine runs in it, between two dispatches.

HTTP handlers live in an event loop. They `ask` for what the thread is to do, and read the events of their
requests from a channel. A client that reads nothing holds up neither: its channel is bounded, and when it is
full the request is cancelled.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

import numpy as np

import kvcache_jax as kv
from kvcache_jax.inspect.block_view import group_views

MOST_FAILURES = 3
"""Failures of the device, one after the other, after which the thread gives up."""
MOST_UNREAD = 256
"""Events of a continuation that its client may leave unread."""
_LOGGER = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818
    """Says that no more events will come: the engine failed, the server ends, or the client read nothing."""


@dataclasses.dataclass(eq=False)
class Continuation:
    """A sample that has not ended, as the page shows it."""

    request: kv.GenerationRequest
    sample_id: int
    tokens: list[int] = dataclasses.field(default_factory=list)


class Channel:
    """Events of the requests of one client, from the engine's thread to the client's event loop.

    Args:
      thread: Owns the engine.
      requests: With ids of their own.
      most_unread: Events of a continuation.
    """

    def __init__(
        self,
        thread: "EngineThread",
        requests: Sequence[kv.GenerationRequest],
        most_unread: int = MOST_UNREAD,
    ):
        self.requests = requests
        self._thread, self._loop = thread, asyncio.get_running_loop()
        self._num_left = sum(request.num_samples for request in requests)
        self._most_unread, self._is_closed = most_unread * self._num_left, False
        self._events: asyncio.Queue[kv.engine.TokenEvent | Stopped] = asyncio.Queue()

    def put(self, event: kv.engine.TokenEvent | Stopped) -> None:
        """Hands an event over; called in the engine's thread, and waits for nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the client's connection
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: kv.engine.TokenEvent | Stopped) -> None:
        if self._is_closed:
            return
        if self._events.qsize() < self._most_unread:
            self._events.put_nowait(event)
        else:
            self.close()
            self._events.put_nowait(Stopped("the client left too many events unread"))

    async def events(self) -> AsyncIterator[kv.engine.TokenEvent]:
        """Yields events until all continuations have ended.

        Raises:
          Stopped: they will not end.
        """
        while self._num_left:
            event = await self._events.get()
            if isinstance(event, Stopped):
                raise event
            self._num_left -= event.finish_reason is not None
            yield event

    def close(self) -> None:
        """Cancels what has not ended; no more events are wanted."""
        if self._num_left and not self._is_closed:
            self._thread.cancel(self.requests)
        self._is_closed = True


class EngineThread:
    """Drains an engine, and does what is asked between two dispatches.

    Args:
      engine: Compiled; belongs to this thread from `start` on.
    """

    def __init__(self, engine: kv.Engine):
        self._engine = engine
        self._asked: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future]] = (
            collections.deque()
        )
        self._came = threading.Condition()
        self._end: str | None = None  # why nothing is done any more
        self._channels: dict[Hashable, Channel] = {}
        self._continuations: dict[int, Continuation] = {}  # by the number that the engine's state has
        self._numbers: dict[tuple[Hashable, int], int] = {}
        self._num_left: dict[Hashable, int] = {}  # samples that have not ended
        self._num_pushed = self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def end(self) -> str | None:
        """Why the thread has ended; None while it serves."""
        return self._end

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end, and all requests with it; waits for nothing."""
        with self._came:
            self._end = self._end or "the server ends"
            self._came.notify()

    def close(self) -> None:
        """Ends the thread."""
        self.stop()
        self._thread.join()

    async def ask(self, function: Callable[[], Any]) -> Any:
        """Has the thread call a function, and returns or raises what it does.

        Raises:
          Stopped: the thread has ended.
        """
        return await asyncio.wrap_future(self._post(function))

    async def submit(self, channel: Channel) -> bool:
        """Pushes the requests of a channel, all or none; False where the queue is full.

        Raises:
          ValueError: the engine refuses one.
          Stopped: the thread has ended.
        """
        return await self.ask(lambda: self._push(channel))

    def cancel(self, requests: Sequence[kv.GenerationRequest]) -> None:
        """Ends requests that have not ended; waits for nothing."""
        with contextlib.suppress(Stopped):
            self._post(lambda: self._cancel(requests))

    async def metrics(self) -> dict[str, Any]:
        """Returns the engine's metrics; see `Engine.metrics`."""
        return await self.ask(self._engine.metrics)

    async def view(self) -> dict[str, Any]:
        """Returns who holds what: blocks of each layer group, running rows, the queue, metrics."""
        return await self.ask(self._view)

    def _post(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._came:
            if self._end is not None:
                raise Stopped(self._end)
            self._asked.append((function, future))
            self._came.notify()
        return future

    # --- in the thread ---

    def _run(self) -> None:
        try:
            while self._wait():
                self._answer()
                if self._engine.num_unfinished:
                    self._drain()
        except Exception as error:
            _LOGGER.exception("the engine's thread ends")
            with self._came:
                self._end = f"the engine failed: {error}"
        self._answer()
        for channel in {id(channel): channel for channel in self._channels.values()}.values():
            channel.put(Stopped(self._end or ""))

    def _wait(self) -> bool:
        with self._came:
            self._came.wait_for(lambda: self._asked or self._end or self._engine.num_unfinished)
            return self._end is None

    def _answer(self) -> None:
        with self._came:
            asked = [*self._asked]
            self._asked.clear()
        for function, future in asked:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._end is not None:
                    raise Stopped(self._end)
                future.set_result(function())
            except Exception as error:  # belongs to the one who asked
                future.set_exception(error)

    def _drain(self) -> None:
        try:
            self._engine.drain()
            self._num_failures = 0
        except kv.engine.EngineFailed as error:
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES:
                raise
            _LOGGER.warning("the device failed, requests go on: %r", error.__cause__)
            self._engine.reset()
        for event in self._engine.take_events():
            self._deliver(event)

    def _push(self, channel: Channel) -> bool:
        num_taken = self._engine.push(channel.requests)
        taken, is_whole = channel.requests[:num_taken], num_taken == len(channel.requests)
        for request, sample_id in ((r, i) for r in taken for i in range(r.num_samples)):
            self._numbers[request.id, sample_id] = self._num_pushed
            self._continuations[self._num_pushed] = Continuation(request, sample_id)
            self._num_pushed += 1
        self._num_left |= {request.id: request.num_samples for request in taken}
        if is_whole:
            self._channels |= {request.id: channel for request in taken}
        else:
            self._cancel(taken)
        return is_whole

    def _cancel(self, requests: Sequence[kv.GenerationRequest]) -> None:
        for request in requests:
            self._channels.pop(request.id, None)
            self._engine.cancel(request.id)

    def _deliver(self, event: kv.engine.TokenEvent) -> None:
        number = self._numbers[event.id, event.sample_id]
        self._continuations[number].tokens += event.tokens
        channel = self._channels.get(event.id)
        if event.finish_reason is not None:
            del self._numbers[event.id, event.sample_id], self._continuations[number]
            self._num_left[event.id] -= 1
            if not self._num_left[event.id]:
                del self._num_left[event.id]
                self._channels.pop(event.id, None)
        if channel is not None:
            channel.put(event)

    def _view(self) -> dict[str, Any]:
        state, metrics = self._engine.state, self._engine.metrics()
        groups = group_views(state.cache, "the page", None)
        slots, numbers = np.asarray(state.row_request), np.asarray(state.requests.uid)
        rows, running = [], set()
        for row in np.flatnonzero(slots < len(numbers)).tolist():
            number = numbers[slots[row]].item()
            one = self._continuations.get(number)
            if one is None:  # it ended, and the state is a dispatch ahead
                continue
            running.add(number)
            blocks = [_held(group.block_table[row], len(group.state)) for group in groups]
            rows.append({"row": row, "length": groups[0].length[row].item(), "blocks": blocks, "is": one})
        waiting = [one for number, one in self._continuations.items() if number not in running]
        return {
            "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
            "groups": [
                {
                    "title": group.title,
                    "owner": group.owner.tolist(),
                    "state": group.state.tolist(),
                    "ref_count": group.ref_count.tolist(),
                }
                for group in groups
            ],
            "rows": rows,
            "waiting": list(itertools.islice(waiting, 8)),
        }


def _held(table: np.ndarray, num_blocks: int) -> list[int]:
    return [block for block in table.tolist() if 0 <= block < num_blocks]
