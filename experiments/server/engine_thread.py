"""The thread that drains the engine, while HTTP handlers push and cancel requests from threads of theirs.

So an engine hears at once of who comes and who leaves, and ends what is under way where it can. Handlers live
in an event loop, which waits for none of this; they read the events of their requests from a channel. A
client that reads nothing holds up no other: its channel is bounded, and when it is full the request is
cancelled. What looks into the engine's state is asked of the thread, and done between two dispatches.
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

    Attributes:
      is_closed: Whether its client has left; no request of it is pushed any more.
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
        self._most_unread, self.is_closed = most_unread * self._num_left, False
        self._events: asyncio.Queue[kv.engine.TokenEvent | Stopped] = asyncio.Queue()

    def put(self, event: kv.engine.TokenEvent | Stopped) -> None:
        """Hands an event over; called in any thread, and waits for nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the client's connection
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: kv.engine.TokenEvent | Stopped) -> None:
        if self.is_closed:
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
        was_closed, self.is_closed = self.is_closed, True
        if self._num_left and not was_closed:
            self._loop.run_in_executor(None, self._thread.cancel, self.requests)


class EngineThread:
    """Drains an engine, and delivers its events.

    Args:
      engine: Compiled; nothing else drains it.
    """

    def __init__(self, engine: kv.Engine):
        self._engine = engine
        self._asked: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future]] = (
            collections.deque()
        )
        # `_came` guards what wakes the thread, and is held for a moment. `_lock` guards the tables of
        # requests: pushes hold it, so that no event comes before its request is in them.
        self._came, self._lock = threading.Condition(), threading.Lock()
        self._has_news = False  # the engine may have events although nothing in it is unfinished
        self._end: str | None = None  # why nothing is done any more
        self._channels: dict[Hashable, Channel] = {}
        self._continuations: dict[int, Continuation] = {}  # by the number that the engine's state has
        self._numbers: dict[tuple[Hashable, int], int] = {}
        self._num_left: dict[Hashable, int] = {}  # samples that have not ended
        self._num_pushed = self._num_failures = 0
        self._is_lost = False  # the engine's state
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def end(self) -> str | None:
        """Why the thread has ended; None while it serves."""
        return self._end

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tells all clients that the server ends, and the thread to; waits for nothing."""
        self._wake("the server ends")
        # A signal's handler calls this, and it may have interrupted a thread that has the lock.
        threading.Thread(target=self._end_all, name="end of requests", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self.stop()
        self._thread.join()

    async def ask(self, function: Callable[[], Any]) -> Any:
        """Has the thread call a function between two dispatches, and returns or raises what it does.

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
        return await asyncio.to_thread(self._push, channel)

    def cancel(self, requests: Sequence[kv.GenerationRequest]) -> None:
        """Ends requests that have not ended; their client is told nothing more."""
        with self._lock:
            self._cancel(requests)
        self._wake()

    async def metrics(self) -> dict[str, Any]:
        """Returns the engine's metrics; see `Engine.metrics`.

        Raises:
          Stopped: the thread has ended.
        """
        self._check()
        return await asyncio.to_thread(self._engine.metrics)

    async def view(self) -> dict[str, Any]:
        """Returns who holds what: blocks of each layer group, running rows, the queue, metrics."""
        return await self.ask(self._view)

    def _check(self) -> None:
        if self._end is not None:
            raise Stopped(self._end)

    def _wake(self, end: str | None = None) -> None:
        with self._came:
            self._end, self._has_news = self._end or end, True
            self._came.notify()

    def _post(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._came:
            self._check()
            self._asked.append((function, future))
            self._came.notify()
        return future

    def _push(self, channel: Channel) -> bool:
        with self._lock:
            self._check()
            if channel.is_closed:
                raise Stopped("the client left before its request was taken")
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
        self._wake()
        return is_whole

    def _cancel(self, requests: Sequence[kv.GenerationRequest]) -> None:
        for request in requests:
            self._channels.pop(request.id, None)
            self._engine.cancel(request.id)

    def _end_all(self) -> None:
        """Ends all requests, so that what is under way ends soon, and the thread."""
        for request_id in self._tell_end():
            with self._lock:
                self._engine.cancel(request_id)

    def _tell_end(self) -> list[Hashable]:
        """Tells all clients why nothing more comes, and returns the ids of their requests."""
        with self._lock:
            for channel in {id(channel): channel for channel in self._channels.values()}.values():
                channel.put(Stopped(self._end or ""))
            request_ids = [*self._channels]
            self._channels.clear()
        return request_ids

    # --- in the thread ---

    def _run(self) -> None:
        try:
            while self._wait():
                if self._is_lost:
                    self._reset()
                self._answer()
                if self._engine.num_unfinished and not self._is_lost:
                    self._drain()
                self._deliver_all()
        except Exception as error:
            _LOGGER.exception("the engine's thread ends")
            self._wake(f"the engine failed: {error}")
        self._answer()
        self._tell_end()

    def _wait(self) -> bool:
        with self._came:
            self._came.wait_for(
                lambda: self._asked or self._end or self._has_news or self._engine.num_unfinished
            )
            self._has_news = False
            return self._end is None

    def _answer(self) -> None:
        with self._came:
            asked = [*self._asked]
            self._asked.clear()
        for function, future in asked:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._check()
                future.set_result(function())
            except Exception as error:  # belongs to the one who asked
                future.set_exception(error)

    def _drain(self) -> None:
        try:
            self._engine.drain()
            self._num_failures = 0
        except kv.engine.EngineFailed as error:
            self._is_lost = True
            self._note_failure(error)
        except Exception as error:
            # One of a request's own functions, such as the text of its tokens, ends that request alone.
            if not self._deliver_all():
                self._note_failure(error)

    def _reset(self) -> None:
        try:
            self._engine.reset()
            self._is_lost = False
        except kv.engine.EngineFailed as error:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Counts failures that come one after the other, and raises the last one that may cost no request."""
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES:
            raise error
        _LOGGER.warning("the engine failed, requests go on: %r", error.__cause__ or error)

    def _deliver_all(self) -> bool:
        with self._lock:
            events = self._engine.take_events()
            for event in events:
                self._deliver(event)
        return bool(events)

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
        with self._lock:
            continuations = dict(self._continuations)
        slots, numbers = np.asarray(state.row_request), np.asarray(state.requests.uid)
        rows, running = [], set()
        for row in np.flatnonzero(slots < len(numbers)).tolist():
            number = numbers[slots[row]].item()
            one = continuations.get(number)
            if one is None:  # it ended, and the state is a dispatch ahead
                continue
            running.add(number)
            blocks = [_held(group.block_table[row], len(group.state)) for group in groups]
            rows.append({"row": row, "length": groups[0].length[row].item(), "blocks": blocks, "is": one})
        waiting = [one for number, one in continuations.items() if number not in running]
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
