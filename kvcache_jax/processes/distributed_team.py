"""A team of the processes of `jax.distributed`: one leads, the others follow, and who is lost is named.

Orders go through the key-value store of JAX's coordination service, not through the devices: a process
that waits for an order can look at a clock, and one that waits in a collective cannot. This is the one file
that knows of process ids.
"""

import atexit
import codecs
import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the coordination service's store has no public name

from kvcache_jax.arrays.number_checks import positive_seconds
from kvcache_jax.core.team import ProcessLost, Team
from kvcache_jax.processes.failures import Failure, is_symptom, last_line
from kvcache_jax.processes.team_settings import risks_of_settings

_LEADER = 0
_POLL_S = 0.0005
_WAIT_MS = 500
_KEPT_ORDERS = 256
_TIMEOUTS_TO_COME = 10
"""Within so many times `timeout_s` each process makes its team: what comes before may take long."""
_SILENCE = (
    "process {} has given no sign of life for {:g} s, and what the others compute with it is lost: start all "
    "processes again"
)
_numbers = itertools.count()


def check_coordinator(address: str, process_id: int, *, timeout_s: float = 30.0) -> None:
    """Checks what `jax.distributed.initialize` is about to use, and ends the process by an abort without.

    Args:
      address: Host and port of the coordinator, which is in process 0: its port must be free there.
      process_id: Of this process. Others than 0 wait until the coordinator is there.
      timeout_s: Seconds to wait.

    Raises:
      ValueError: no host and port.
      OSError: the port is in use.
      TimeoutError: there is no coordinator.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"address is {address!r}, expected a host and a port such as 'host0:1234'")
    if process_id == _LEADER:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            message = f"the coordinator's port {port} cannot be used ({error.strerror}), expected a free one"
            raise OSError(error.errno, message) from error
        return
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), _POLL_S)  # a host may answer nothing
        try:
            return socket.create_connection((host, int(port)), left_s).close()
        except OSError as error:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"process {process_id} found no coordinator at {address} in {timeout_s:g} s ({error}), "
                    "expected process 0 to run there: start it too, or correct the address"
                ) from error
        time.sleep(min(_WAIT_MS / 1000, timeout_s / 10))


class Disagreement(ValueError):  # noqa: N818
    """Says that processes call the same with other arguments."""


class DistributedTeam(Team):
    """The processes of `jax.distributed`, for engines on a mesh of all their devices.

    Every process makes the team, and then the same engines, in the same order, with equal arguments. Process
    0 leads: within `run` it alone pushes requests and reads events, and the others do as it does. Parameters
    are set in all processes, between two calls of `run`.

    A process that is stopped or gone is noticed by the others after `timeout_s`; one that is slow, or
    compiles for long, is not lost. The end of process 0 ends all at once: it has the coordination service.

    Args:
      timeout_s: Seconds after which a process that gives no sign of life is lost; ten times as long for one
        that makes no team at all.
      exits: Where one is lost, followers write a sentence to stderr and end their process, with the exit
        status 70, for a collective that hangs lets it end in no other way; after `timeout_s` more where a
        call of the team looks at no clock, as while it compiles. The leader's engine raises `EngineFailed`,
        so that it can save what it has; end it by `os._exit` then. False: followers raise `ProcessLost`.

    Raises:
      RuntimeError: `jax.distributed.initialize` was not called.

    Example:
      jax.distributed.initialize()
      team = kv.processes.DistributedTeam()
      engine = kv.Engine(..., placement=kv.engine.Placement(mesh, "rows", team=team))

      def lead():
          engine.push(requests)
          return [*engine]

      events = team.run(lead)  # None in all processes but the leader
    """

    remedy = (
        "engine.reset() where all failed alike; else that all processes are started again, for a collective "
        "that one has left stays closed"
    )

    def __init__(self, *, timeout_s: float = 30.0, exits: bool = True):
        timeout_s = positive_seconds("timeout_s", timeout_s)
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "there is no team of one process, expected a call of jax.distributed.initialize() before"
            )
        for risk in risks_of_settings(timeout_s):
            warnings.warn(risk, stacklevel=2)
        self._client: Any = client
        self._key = f"kvcache_jax/team {next(_numbers)}/"
        self._exits, self._timeout_s, self._pause_s = exits, timeout_s, min(timeout_s / 5, 1.0)
        # Until a silent process is surely known for one; a look takes longer on a machine with much to do.
        self._num_looks, self._grace_looks = 0, int(timeout_s / self._pause_s) + 5
        self._members: list[Callable[..., None]] = []
        self._runs = self._is_guarded = False
        self._call = 0, "DistributedTeam"  # number and name of the call that all processes make
        self._num_orders = self._num_agreed = self._first_order = 0
        self._lost: str | None = None
        self._num_looks_lost = self._num_calls = 0
        self._made_at = time.monotonic()
        self._failed: dict[int, tuple[bytes, float]] = {}  # by process: its last error, and in which look
        self._signs: dict[int, tuple[bytes, float]] = {}  # by process: its last sign of life, and when
        of, stop = weakref.ref(self), threading.Event()
        watch = threading.Thread(target=_watch, args=(of, stop), daemon=True)
        watch.start()
        threading.Thread(target=_watch_looks, args=(of, stop), daemon=True).start()
        atexit.register(_leave, of, stop, watch, client, self._key, timeout_s)

    @property
    def is_leader(self) -> bool:
        """Tests whether this process decides."""
        return jax.process_index() == _LEADER

    def run(self, lead: Callable[[], Any]) -> Any:
        """Runs `lead` in the leader, while the others follow it.

        Args:
          lead: Pushes, reads events, cancels, resets, releases; returns anything.

        Returns:
          What `lead` returns; in the other processes None, once it has ended.

        Raises:
          ProcessLost: in a follower: another process is silent.
        """
        self._call = self._call[0] + 1, "run"
        if not self.is_leader:
            with self._calling():
                return self._follow()
        self._runs = True
        try:
            return lead()
        finally:
            self._runs = False
            if self._lost is None:
                self._send(None)

    def join(self, obey: Callable[..., None]) -> int:
        """Takes a member, the same in all processes."""
        self._members.append(obey)
        return len(self._members) - 1

    def tell(self, member: int, order: str, *args: Any) -> None:
        """Tells a member of all other processes what to do."""
        if not self._runs:
            where = "outside of run" if self.is_leader else f"in process {jax.process_index()}"
            raise RuntimeError(f"{order} is called {where}, expected in the leader, within team.run(lead)")
        if self.is_leader:
            self._check()
            self._send((member, order, args))

    def require_all(self, call: str) -> None:
        """Refuses a call that all processes have to make, where the leader alone makes it."""
        if self._runs:
            raise RuntimeError(f"{call} is called within run, expected in all processes, between two runs")

    def agree(self, call: str, what: str, marks: Callable[[], Mapping[str, Any]]) -> None:
        """Compares what all processes know under the same names, in a call that each makes."""
        if not self._runs:
            self._call = self._call[0] + 1, call
        with self._calling(may_end=not self.is_leader):
            self._agree(call, what, marks)

    @contextlib.contextmanager
    def guard(self, call: str) -> Iterator[None]:
        """Guards a call of all processes in which each waits for the others, such as `kv.generate`.

        Where one is lost meanwhile, the others write a sentence that names it and end as followers do, after
        `timeout_s` more; those whose collective fails before raise `ProcessLost`, and all if `exits` is False
        and their collectives end. An error of a device is raised as `ProcessLost` too, where it is another
        process's. A process that fails in the call alone, by an error of any kind, is lost to those that wait
        for it. Guards may be nested: then the outer one explains.

        Args:
          call: Its name, by which processes that call something else are named.

        Raises:
          TypeError: no name.
          RuntimeError: the leader alone makes it, within `run`.
          ProcessLost: another process is lost, before or meanwhile, or failed.

        Example:
          with team.guard("generate"):
              result = kv.generate(forward, params, prompts, config, max_new_tokens=9)
        """
        if not isinstance(call, str):
            raise TypeError(f"call is {call!r}, expected the name of a call, a string")
        self.require_all(call)
        if self._lost:
            raise ProcessLost(self._lost)
        self._call = self._call[0] + 1, call
        is_within, self._is_guarded = self._is_guarded, True
        try:
            with self._calling():
                yield
        except Exception as error:
            if is_within or isinstance(error, ProcessLost):
                raise
            if isinstance(error, jax.errors.JaxRuntimeError):
                explained = self.explained(error)
                raise explained from explained.__cause__
            self._note_failure(error)
            raise
        finally:
            self._is_guarded = is_within

    def _agree(self, call: str, what: str, marks: Callable[[], Mapping[str, Any]]) -> None:
        key, me = f"{self._key}agree {self._num_agreed}/", jax.process_index()
        self._num_agreed += 1
        try:
            mine: Any = {**marks()}
        except Exception as error:  # the others wait for the marks
            self._client.key_value_set_bytes(f"{key}{me}", pickle.dumps(last_line(error)))
            raise
        self._client.key_value_set_bytes(f"{key}{me}", pickle.dumps(mine))
        for process in range(jax.process_count()):
            others = pickle.loads(self._get(f"{key}{process}"))
            if isinstance(others, str):
                raise Disagreement(f"process {process} fails in {call}, and this one does not: {others}")
            same = mine.keys() & others.keys()
            different = sorted(name for name in same if mine[name] != others[name])
            if different or mine.keys() ^ others.keys() and not same:
                place = f" at {different[0]}" if different and different[0] else ""
                raise Disagreement(
                    f"process {process} has other {what}{place} than process {me}, expected {call} with "
                    "equal arguments, of equal code, in all processes"
                )
        # All have begun this comparison, and so ended the one before: a trainer makes thousands.
        self._client.key_value_delete(f"{self._key}agree {self._num_agreed - 2}/{me}")

    def wait(self, array: jax.Array) -> None:
        """Waits until an array of all processes is there, or one of them is lost."""
        while not array.is_ready():  # type: ignore  # jax.Array's type does not name it
            self._check()
            time.sleep(_POLL_S)
        errors = [error for shard in array.addressable_shards if (error := _error_of(shard.data))]
        if errors:
            raise min(errors, key=is_symptom)

    def explained(self, error: Exception) -> Exception:
        """Waits for a sign that another process is why the device failed, after a sign of its own."""
        if isinstance(error, ProcessLost):
            return error
        if self._is_guarded or not self.is_leader:
            self._note_failure(error)
        last, end = self._num_looks + self._grace_looks, time.monotonic() + 10 * self._timeout_s
        while self._num_looks < last and time.monotonic() < end:
            try:
                self._check()
            except ProcessLost as lost:
                lost.__cause__ = error
                return lost
            time.sleep(_POLL_S)
        return error

    def forget_failures(self) -> None:
        """Goes on after errors of other processes, with a state that is made anew."""
        self._first_order = self._num_orders

    @contextlib.contextmanager
    def _calling(self, may_end: bool = True) -> Iterator[None]:
        """Marks a call that cannot go on without the others, and whether it may end this process then."""
        self._num_calls += may_end
        try:
            yield
        finally:
            self._num_calls -= may_end

    def _follow(self) -> None:
        """Obeys the leader's orders until it dismisses this process."""
        while True:
            order = pickle.loads(codecs.decode(self._get(self._order_key(self._num_orders)), "zlib"))
            self._num_orders += 1
            if order is None:
                return
            member, name, args = order
            self._runs = True
            try:
                self._members[member](name, *args)
            except Disagreement:
                raise
            except Exception as error:
                if self._lost:
                    self._end()
                traceback.print_exc()  # the leader is told its last line alone
                self._note_failure(error)  # the leader has the same one, or has to know it
            finally:
                self._runs = False

    def _note_failure(self, error: Exception) -> None:
        order, call = (0, self._call[0]) if self._is_guarded else (self._num_orders, 0)
        key = f"{self._key}failed/{jax.process_index()}"
        noted = Failure.of(error, order, call).encode()
        self._client.key_value_set_bytes(key, noted, allow_overwrite=True)

    def _end(self) -> NoReturn:
        """Ends a process whose team is lost."""
        assert self._lost
        if self._exits:
            sys.stderr.write(self._lost + "\n")
            sys.stderr.flush()
            os._exit(70)
        raise ProcessLost(self._lost)

    def _check(self) -> None:
        if self._lost:
            raise ProcessLost(self._lost)
        for process, failure, is_old in self._failures():
            is_new = failure.order > self._first_order or self._is_here(failure)
            # Where a process is lost, the others' collectives fail too: its silence says more than they do.
            if is_new and (is_old or not failure.is_symptom):
                raise ProcessLost(f"process {process} failed: {failure.error}")

    def _failures(self) -> Iterator[tuple[int, Failure, bool]]:
        """Lists what other processes noted, and whether a silent process would be known since."""
        for process, (text, at) in tuple(self._failed.items()):
            yield process, Failure.decode(text), self._num_looks - at > self._grace_looks

    def _is_here(self, failure: Failure) -> bool:
        """Tests whether it is of the guarded call that this process makes."""
        return self._is_guarded and failure.call == self._call[0]

    def _send(self, order: Any) -> None:
        """Sends an order to all followers, and forgets one that they have done long ago."""
        text = codecs.encode(pickle.dumps(order), "zlib")
        self._client.key_value_set_bytes(self._order_key(self._num_orders), text)
        if self._num_orders >= _KEPT_ORDERS:
            self._client.key_value_delete(self._order_key(self._num_orders - _KEPT_ORDERS))
        self._num_orders += 1

    def _order_key(self, number: int) -> str:
        return f"{self._key}order {number}"

    def _get(self, key: str) -> bytes:
        """Waits for a value of the store, as long as no process is lost."""
        while not self._lost:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is not there yet
                return self._client.blocking_key_value_get_bytes(key, _WAIT_MS)
        if self.is_leader:
            raise ProcessLost(self._lost)
        self._end()

    def _look(self) -> None:
        """Gives a sign of life, and looks for the others' signs."""
        me, (number, call) = jax.process_index(), self._call
        sign = f"{number} {time.monotonic()} {call}"
        self._client.key_value_set_bytes(f"{self._key}alive/{me}", sign.encode(), allow_overwrite=True)
        self._num_looks += 1
        for what, found in (("alive", self._signs), ("failed", self._failed)):
            now = time.monotonic() if what == "alive" else self._num_looks
            for name, sign in self._client.key_value_dir_get_bytes(f"{self._key}{what}/"):
                process = int(name.rsplit("/", 1)[1])
                if process != me and sign != found.get(process, (None,))[0]:
                    found[process] = sign, now
        lost = self._look_for_lost(me, number, call)
        self._num_looks_lost = self._num_looks_lost + 1 if lost else 0
        # The followers end first: after the leader's end they cannot say anything.
        if self._num_looks_lost > (2 if self.is_leader else 0):
            self._lost = self._lost or lost

    def _look_for_lost(self, me: int, number: int, call: str) -> str | None:
        """Finds a process that is silent, or makes another call than this one; the names of calls count."""
        limit_s = _TIMEOUTS_TO_COME * self._timeout_s
        for process in {*range(jax.process_count())} - {me}:
            if process not in self._signs and time.monotonic() - self._made_at > limit_s:
                return (
                    f"process {process} has made no team for {limit_s:g} s, expected the same calls in the "
                    "same order in all processes: it has ended, or is to make its team sooner"
                )
        for process, (sign, at) in self._signs.items():
            other_number, _, other_call = sign.decode().split(" ", 2)
            if time.monotonic() - at > self._timeout_s:
                return _SILENCE.format(process, self._timeout_s)
            if int(other_number) == number and other_call != call:
                return (
                    f"process {process} calls {other_call} where process {me} calls {call}, expected the "
                    "same calls in the same order in all processes"
                )
        for process, failure, is_old in self._failures():
            if is_old and self._is_here(failure):  # all may fail alike, one sooner than another
                return f"process {process} failed in {call}, for which this process waits: {failure.error}"
        return None


def _error_of(data: jax.Array) -> Exception | None:
    try:
        data.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return error
    return None


def _watch(of: weakref.ref, stop: threading.Event) -> None:
    """Looks after a team, as long as it is there."""
    while (team := of()) is not None:
        pause_s = team._pause_s
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # without the store there is nothing to see
            team._look()
        del team
        if stop.wait(pause_s):
            return


def _watch_looks(of: weakref.ref, stop: threading.Event) -> None:
    """Counts how long a call goes on after the team is lost, and in a follower how long a look lasts.

    Where the leader is stopped, and the store with it, what asks it never returns. Pauses are counted, not
    seconds, in which this process may have been stopped itself.
    """
    num_looks = num_same = num_lost = 0
    while (team := of()) is not None:
        pause_s, most = team._pause_s, team._timeout_s / team._pause_s
        num_looks, num_same = team._num_looks, num_same + 1 if num_looks == team._num_looks else 0
        if num_same > most and not team.is_leader:
            team._lost = team._lost or _SILENCE.format(_LEADER, team._timeout_s)
        num_lost = num_lost + 1 if team._lost and team._num_calls else 0
        if num_lost > most and team._exits:
            team._end()
        del team
        if stop.wait(pause_s):
            return


def _leave(
    of: weakref.ref, stop: threading.Event, watch: threading.Thread, client: Any, key: str, timeout_s: float
) -> None:
    """Ends with the others, of a forgotten team too; the leader last, for without its service they abort."""
    team, state = of(), distributed.global_state
    if team is not None:
        team._call = team._call[0] + 1, "exit"  # so that one that goes on is told, and does not wait
    is_whole = state.client is client and (team is None or team._lost is None)
    try:
        if is_whole:
            client.wait_at_barrier(f"{key}leave", int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError:
        is_whole = False  # one has ended already
    stop.set()
    watch.join(timeout_s)  # where this thread is in the store while Python ends, the process aborts
    if is_whole:
        # Without recoverability, shutdown itself waits for all.
        if state.process_id == _LEADER and jax.config.jax_enable_recoverability:  # type: ignore
            client.get_live_nodes([*range(state.num_processes)])  # which the others do not ask: they left
        jax.distributed.shutdown()
