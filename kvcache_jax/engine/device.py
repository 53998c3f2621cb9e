"""The device's side of an engine: its state, and the dispatches under way.

All reads of the device go through one `Reader`. What runs on the device runs in all processes of a team: the
leader's calls are told to the others before they are done.
"""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvcache_jax.arrays.sharding import OnHost, to_devices, to_host
from kvcache_jax.core.attachment import ShardCache
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.team import ProcessLost, marks_of
from kvcache_jax.engine.events import Reader
from kvcache_jax.engine.exchange import Exchange
from kvcache_jax.engine.failure import EngineFailed
from kvcache_jax.engine.live_length import LiveLength
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.pace import Length
from kvcache_jax.engine.program import Inbox
from kvcache_jax.engine.requests import TableSizes
from kvcache_jax.engine.shards import Shards, with_same_shapes
from kvcache_jax.engine.state import EngineState
from kvcache_jax.engine.step import Model
from kvcache_jax.operations.transfer import BlockContents


class _Flight(NamedTuple):
    """A dispatch under way."""

    reports: jax.Array
    launched_at: float
    length: LiveLength


class Arrival(NamedTuple):
    """The reports i32[shards, any] of a dispatch; seconds of `time.monotonic`."""

    reports: np.ndarray
    begun_at: float
    at: float
    is_late: bool  # they were there before the host asked

    @property
    def device_s(self) -> float | None:
        """Seconds of the device, if they are known."""
        return None if self.is_late else self.at - self.begun_at


class _Kept(NamedTuple):
    """The rest of a state whose memory was given back: its arrays in host memory, or None."""

    state: EngineState | None


class Device:
    """Runs the program of an engine, from dispatch to dispatch.

    Attributes:
      params: Of the model, where the program wants them.
      read: The `Reader`.
      hears: Whether a dispatch under way can be shortened.
    """

    def __init__(
        self,
        shards: Shards,
        model: Model,
        options: Options,
        params: Any,
        sizes: TableSizes,
        outbox_shape: tuple[int, int],
    ):
        self._shards, self._model, self._options = shards, model, options
        self._sizes, self._outbox_shape = sizes, outbox_shape
        self.params = shards.place_params(params)
        self.read = Reader()
        self._lengths = [LiveLength(shards.home)]  # of no dispatch
        self.hears = self._lengths[0].is_live
        self._team = shards.team
        self._member = self._team.join(self._obey)
        self._told = list[Inbox]()
        self._seen: list[ShardCache] | None = None  # since the last dispatch
        self._team.agree("Engine", "params", lambda: marks_of(self.params))
        self._state: EngineState | None = None
        self._failure: Exception | None = None
        self._kept: _Kept | None = None
        self._in_flight: deque[_Flight] = deque()
        self._arrived_at = 0.0

    @property
    def num_in_flight(self) -> int:
        """Dispatches whose reports are to be read."""
        return len(self._in_flight)

    @property
    def state(self) -> EngineState:
        """The state after all dispatches; donated by the next one."""
        if self._failure is None and self._state is not None:
            return self._state
        if self._kept is not None:
            raise RuntimeError("the engine's memory was given back, expected engine.restore()")
        if isinstance(self._failure, ProcessLost):
            raise EngineFailed(str(self._failure)) from self._failure
        raise EngineFailed(
            "the device, or a callback in the model, failed and the engine's state is lost, expected "
            f"{self._team.remedy}"
        ) from self._failure

    def begin(self, counters: np.ndarray) -> None:
        """Makes a new state and forgets all dispatches; `counters` u32[shards, len(EngineCounter)] go on.

        The old state's memory is given back before. If the device fails, there is no state.
        """
        self._state = self._kept = self._seen = None
        self._in_flight.clear()
        try:
            self._state = self._shards.place(self._sizes, self._outbox_shape, counters)
        except jax.errors.JaxRuntimeError as error:
            self._failure = error
        else:
            self._failure = None

    def begin_again(self, counters: np.ndarray) -> None:
        """Begins in all processes, after a failure or a release."""
        self._team.forget_failures()
        self._tell("begin_again", counters)
        self.begin(counters)

    def release(self, keeps: bool) -> None:
        """Gives the state's memory back, of which the host `keeps` a copy, while no dispatch is under way."""
        state = self.state
        self._tell("release", keeps)
        self._kept, self._state = _Kept(jax.tree.map(to_host, state) if keeps else None), None
        for leaf in jax.tree.leaves(state):
            leaf.delete()

    def restore(self) -> bool:
        """Takes the memory of a state that was kept again; False where none was, for `begin`.

        Raises:
          RuntimeError: nothing was released.
          jax.errors.JaxRuntimeError: there is no memory; what was kept still is.
        """
        if self._kept is None:
            raise RuntimeError("the engine has its memory, expected engine.release() before restore()")
        self._tell("restore")
        if self._kept.state is None:
            return False
        is_leaf = lambda leaf: isinstance(leaf, OnHost)  # noqa: E731
        state = jax.tree.map(to_devices, self._kept.state, is_leaf=is_leaf)
        self._state, self._kept = jax.block_until_ready(state), None
        return True

    def with_same_shapes(self, params: Any) -> Any:
        """Refuses parameters that the program was not compiled for, and puts others where it wants them."""
        self._team.require_all("set_params")
        params = self._shards.place_params(with_same_shapes(params, self.params))
        with self._losing():
            self._team.agree("set_params", "params", lambda: marks_of(params))
        return params

    def compile(self, inboxes: Sequence[Inbox]) -> None:
        """Compiles the program, if all processes have the same one."""
        self._tell("compile", inboxes)
        lowered = functools.cache(lambda: self.lower(inboxes))
        program = lambda: {"": hashlib.sha256(lowered().as_text().encode()).hexdigest()}  # noqa: E731
        with self._losing():
            self._team.agree("Engine", "program", program)
        with self._shards.own_mesh():
            lowered().compile()

    def launch(self, inboxes: Sequence[Inbox], length: Length, now: int) -> None:
        """Launches a dispatch at the time `now` in ticks.

        If that raises anything but `EngineFailed`, nothing happened.
        """
        state, launched_at = self.state, time.monotonic()
        old = self._told or [None] * len(inboxes)
        news = [None if inbox is last else inbox for inbox, last in zip(inboxes, old, strict=True)]
        self._tell("launch", news, length, now)
        self._told, self._seen = list(inboxes), None
        live = self._lengths.pop() if self._lengths else LiveLength(self._shards.home)
        numbers = live.begin(*length, now)
        try:
            self._state, reports = self._shards.run(
                self._model, self._options, self.params, state, inboxes, numbers
            )
        except Exception as error:
            self._check(state, error)
            raise
        self._in_flight.append(_Flight(reports, launched_at, live))

    def shorten(self) -> None:
        """Ends the dispatches under way as soon as their lengths allow, where the device hears of it."""
        for flight in tuple(self._in_flight):  # any thread calls it
            flight.length.shorten()

    def require_leader(self, call: str) -> None:
        """Refuses a call that is the leader's."""
        if not self._team.is_leader:
            raise RuntimeError(f"{call} is called in a process that follows, expected in the leader alone")

    def change_caches(self, change: Callable[[int, Cache], Cache]) -> None:
        """Shows each shard's cache to `change`, while no dispatch is under way, and goes on with its result.

        On a mesh it gets a `ShardCache`, and the state follows what is published in that.
        """
        state = self.state
        if self._shards.exchange is not None:
            if self._seen is None:
                self._seen = self._see()
            for shard in range(len(self._seen)):
                change(shard, self._seen[shard])
            return
        try:
            with self._shards.own_mesh():
                self._state = dataclasses.replace(state, cache=change(0, state.cache))
        except Exception as error:
            self._check(state, error)
            raise

    @property
    def _exchange(self) -> Exchange:
        assert self._shards.exchange is not None  # on a mesh alone are there shards to see
        return self._shards.exchange

    def _see(self) -> list[ShardCache]:
        """Reads the control state of all shards; what was seen before serves no more."""
        form = self._exchange.form
        return [
            ShardCache(
                control=control,
                pools=form.pools,
                config=form.config,
                shard=shard,
                export=functools.partial(self.export, shard),
                publish=functools.partial(self._publish, shard),
            )
            for shard, control in enumerate(self.controls())
        ]

    def _publish(self, shard: int, contents: BlockContents) -> tuple[ShardCache, np.ndarray]:
        status = self.publish(shard, len(contents.num_tokens), contents)
        self._seen = self._see()
        return self._seen[shard], status

    def controls(self) -> list[Control]:
        """Reads the control state of all shards, on a mesh."""
        self._tell("controls")
        with self._failing():
            return self._exchange.controls(self.state.cache)

    def export(self, shard: int, block_ids: np.ndarray) -> BlockContents:
        """Reads blocks i32[n] of a shard."""
        self._tell("export", shard, block_ids)
        with self._failing():
            return self._exchange.export(self.state.cache, shard, block_ids)

    def publish(self, shard: int, num: int, contents: BlockContents | None = None) -> np.ndarray:
        """Publishes `num` blocks in a shard; the leader has the contents. Returns the status i32[num]."""
        self._tell("publish", shard, num)
        state = self.state
        with self._failing():
            cache, status = self._exchange.publish(state.cache, shard, num, contents)
            self._state = dataclasses.replace(state, cache=cache)
        return status

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Loses the state with an error of what all processes do."""
        try:
            yield
        except Exception as error:
            self._failure = self._team.explained(error)
            _ = self.state
            raise

    def _check(self, state: EngineState, error: Exception) -> None:
        """Raises `EngineFailed` if an error has cost the state."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            self._failure = self._team.explained(error)
            _ = self.state
        self._team.forget_failures()  # others have the same error

    def arrival(self) -> Arrival:
        """Waits for the oldest reports; an interrupted reader finds them again until they are `dropped`."""
        reports, launched_at, _ = self._in_flight[0]
        is_late = reports.is_ready()  # type: ignore  # jax.Array's type does not name it
        with self._failing():
            self._team.wait(reports)
            found = self.read(reports)
        return Arrival(found, max(launched_at, self._arrived_at), time.monotonic(), is_late)

    def drop(self, arrival: Arrival) -> None:
        """Forgets the oldest reports, which were taken in."""
        self._lengths.append(self._in_flight.popleft().length)
        self._arrived_at = arrival.at

    def lower(self, inboxes: Sequence[Inbox]) -> jax.stages.Lowered:
        """Lowers the program that `launch` runs; an array that is donated meanwhile has a shape still."""
        length = np.ones(3, np.int32)
        return self._shards.lower(self._model, self._options, self.params, self.state, inboxes, length)

    def _tell(self, order: str, *args: Any) -> None:
        """Tells all other processes to do the same."""
        with self._losing():
            self._team.tell(self._member, order, *args)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Loses the state with a process, of which the leader's caller hears as `EngineFailed`."""
        try:
            yield
        except ProcessLost as error:
            if not self._team.is_leader:
                raise
            self._failure = error
            _ = self.state

    def _obey(self, order: str, *args: Any) -> None:
        """Does what the leader does; a failure of a dispatch here is seen at once, for the leader waits."""
        if order != "launch":
            getattr(self, order)(*args)
            return
        news, length, now = args
        old = self._told or news
        self.launch([last if new is None else new for new, last in zip(news, old, strict=True)], length, now)
        self.drop(self.arrival())
