"""The operation `take`: blocks that another process offers are published here, while more are computed."""

import collections
import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import positive_seconds
from kvcache_jax.core import token_arguments
from kvcache_jax.core.state import Cache
from kvcache_jax.tiers.block_store import Data, checked_key
from kvcache_jax.tiers.catalogue import StoreReport
from kvcache_jax.tiers.giver import Ticket, as_ticket
from kvcache_jax.tiers.load_blocks import load
from kvcache_jax.tiers.save_blocks import checked_weights, require_stored
from kvcache_jax.tiers.stored_block import config_digest

_POLL_SECONDS = 0.005


class LeaseEndedError(Exception):
    """The lease of an offer has ended, or its giver was started again."""


class PeerStore:
    """The offers of other processes as a store that is only read: for `AttachedStore(PeerStore(), ...)`.

    Every call has an end: a giver that has died, hangs or is slow is an exception, after which the ticket is
    forgotten. What was read is compared with what was asked by `load`, as of any store.

    Attributes:
      timeout: Seconds that a call takes at most; so long, too, `contains` waits for an offer that is not
        finished.

    Raises:
      ValueError, TypeError: no positive number of seconds, no tickets.
    """

    def __init__(self, *tickets: Ticket, timeout: float = 5.0):
        self.timeout = positive_seconds("timeout", timeout)
        self._peers: list[_Peer] = []
        for ticket in tickets:
            self.expect(ticket)

    def expect(self, ticket: Ticket) -> None:
        """Takes in a ticket; before the request whose prompt it is of."""
        self._peers.append(_Peer(as_ticket(ticket)))

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Tests which keys are offered, once the offers are finished, or all of the keys are there."""
        ends_at = time.monotonic() + self.timeout
        while True:
            found, is_whole = self.see(keys)
            if all(found) or is_whole or time.monotonic() > ends_at:
                return found
            time.sleep(_POLL_SECONDS)

    def see(self, keys: Sequence[str]) -> tuple[list[bool], bool]:
        """Tests which keys are offered now, and whether all offers are finished."""
        found, is_whole = [False] * len(keys), True

        def read(answer: bytes) -> None:
            nonlocal found, is_whole
            words = json.loads(answer)
            found = [x or bool(y) for x, y in zip(found, words["found"], strict=True)]
            is_whole &= bool(words["is_whole"])

        self._ask_all("contains", lambda: keys, read)
        return found, is_whole

    def get(self, keys: Sequence[str]) -> list[Data | None]:
        """Reads the value of each key; None for a miss."""
        found: dict[str, Data] = {}

        def asked() -> list[str]:
            return [key for key in keys if key not in found]

        def read(answer: bytes) -> None:
            names, body = asked(), memoryview(answer)
            start = 8 * len(names)
            for key, size in zip(names, struct.unpack_from(f"<{len(names)}q", body), strict=True):
                if size >= 0:
                    found[key] = body[start : start + size]
                    start += size

        self._ask_all("get", asked, read)
        return [found.get(key) for key in keys]

    def put(self, items: Sequence[tuple[str, Data]]) -> None:
        """Does nothing: what is here is the givers'."""

    def remove(self, keys: Sequence[str]) -> None:
        """Does nothing: what is here is the givers'."""

    def release(self) -> None:
        """Tells the givers that nothing more is needed, and forgets the tickets."""
        try:
            self._ask_all("release", list, lambda answer: None)
        finally:
            for peer in self._peers:
                peer.close()
            self._peers.clear()

    def _ask_all(self, what: str, keys: Callable[[], Sequence[str]], read: Callable[[bytes], None]) -> None:
        """Asks under each ticket, and forgets those whose givers fail; raises where all fail."""
        failures, peers = [], [*self._peers]
        ends_at = time.monotonic() + self.timeout
        for peer in peers:
            if time.monotonic() >= ends_at:  # what a giver before took is no fault of the others
                break
            try:
                read(peer.ask(what, keys(), ends_at))
            except Exception as error:  # a giver may say anything
                failures.append(error)
                self._peers.remove(peer)
                peer.close()
        if failures and len(failures) == len(peers):
            raise failures[0]


class _ArrivingBlocks(PeerStore):
    """A store of what is offered now, which waits for nothing that is still to be computed."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return self.see(keys)[0]


class _Peer:
    """A connection to the giver of a ticket."""

    def __init__(self, ticket: Ticket):
        self._path = f"/{ticket.epoch}/{ticket.number}/"
        self._connection = http.client.HTTPConnection(ticket.host, ticket.port)

    def ask(self, what: str, keys: Sequence[str], ends_at: float) -> bytes:
        """Asks the giver, until a moment of the monotonic clock; raises `TimeoutError` after it."""
        request = self._path + what, json.dumps([*map(checked_key, keys)])
        is_kept = self._connection.sock is not None
        try:
            status, body = self._post(*request, ends_at)
        except ConnectionError:
            if not is_kept:
                raise
            # A giver ends a connection on which nothing was said for a while, and its lease goes on.
            self.close()
            status, body = self._post(*request, ends_at)
        if status == 410:
            raise LeaseEndedError(body.decode())
        if status != 200:
            raise ConnectionError(f"the giver answers {status}: {body.decode(errors='replace')}")
        return body

    def _post(self, path: str, text: str, ends_at: float) -> tuple[int, bytes]:
        """Returns the status of HTTP, and the body, which is whole."""
        connection, seconds = self._connection, max(ends_at - time.monotonic(), 1e-3)
        if connection.sock is None:
            connection.timeout = seconds
            connection.connect()
        assert connection.sock is not None
        # A timeout of the socket ends a read of which nothing comes, and this one that comes byte by byte.
        clock = threading.Timer(seconds, connection.sock.shutdown, [socket.SHUT_RDWR])
        clock.start()
        late = TimeoutError("the giver did not answer in time")
        try:
            connection.request("POST", path, text)
            answer = connection.getresponse()
            body = answer.read()
        except Exception as error:
            if time.monotonic() >= ends_at:
                raise late from error
            raise
        finally:
            clock.cancel()
        if time.monotonic() >= ends_at:  # what was cut short then may look whole
            raise late
        return answer.status, body

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def take(
    ticket: Ticket,
    cache: Cache,
    prompt: Sequence[int] | np.ndarray,
    *,
    weights: str,
    namespace: ArrayLike | None = None,
    timeout: float = 5.0,
) -> tuple[Cache, StoreReport]:
    """Publishes the blocks of a prompt that a `Giver` offers, so that the prompt finds them.

    Blocks travel as they are offered, while the giver computes those that follow; what the cache has of the
    prompt does not travel. Each is verified as by `load`. The lease is given back at the end.

    Args:
      ticket: Of the giver.
      cache: Donated; outside of jit. What it holds stays.
      prompt: Token ids, of which all but the last can be found.
      weights: Digest of the weights here, as of `save`.
      namespace: u32[4], the prompt's. Default: 0.
      timeout: Seconds without a new block, or for a giver's answer, after which nothing more is waited for.

    Returns:
      The cache; what was loaded, and what was not and why, such as "LeaseEndedError", "TimeoutError" or
      "ConnectionRefusedError" of a giver that has gone.

    Raises:
      ValueError, TypeError: as `load`; an offer of other weights or of another config.
    """
    ticket = as_ticket(ticket)
    require_stored("take", cache)
    prompt = token_arguments.host_tokens("prompt", prompt)
    for what, given, own in (
        ("weights", ticket.weights, checked_weights(weights)),
        ("config", ticket.config, config_digest(cache.config)),
    ):
        if given != own:
            raise ValueError(
                f"the offer is of {what} {given[:12]}, expected {own[:12]} as here: take from a giver of the "
                f"same {what} (its layers, dtypes and block sizes)"
            )
    peer, num_loaded, reasons = _ArrivingBlocks(ticket, timeout=timeout), 0, collections.Counter[str]()
    news_at, is_last = time.monotonic(), False
    while not is_last:
        try:
            _, is_last = peer.see([])
        except Exception as error:
            reasons[type(error).__name__] += 1
            break
        cache, report = load(peer, cache, weights=weights, namespace=namespace, prompts=[prompt])
        num_loaded, reasons = num_loaded + report.num_loaded, reasons + collections.Counter(report.reasons)
        if report.num_loaded:
            news_at = time.monotonic()
        elif not is_last:
            if time.monotonic() - news_at > timeout:
                reasons[TimeoutError.__name__] += 1
                break
            time.sleep(_POLL_SECONDS)
    with contextlib.suppress(Exception):  # the lease ends by itself
        peer.release()
    return cache, StoreReport(num_loaded=num_loaded, reasons=reasons)
