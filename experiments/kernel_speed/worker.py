"""The process that `experiments.kernel_speed` measures in; another takes its place when it ends or hangs.

Reads jobs from standard input and writes what it is about to do, and what came out, to the pipe `--events`;
each is a line of JSON. Reports of what crashes or does not answer are therefore up to the process that
started it (`kernel_speed_process`).

To the pipe: `hello` (or `refused`, and it ends), then for each job any number of `side` and `step`, one of
`entry`, `skipped` and `lost` (and it ends), and `ready`, if it can go on.
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from experiments.common import command
from experiments.kernel_speed.timing import (
    CLEAN,
    DATA,
    FAILURES,
    Contest,
    LostDeviceError,
    Side,
    compete,
    one_line,
)


class JobSource(Protocol):
    """What `kernel_speed_jobs.Jobs` is."""

    environment: dict[str, Any]

    @property
    def names(self) -> list[tuple[str, str]]: ...

    def make(self, kind: str, name: str) -> tuple[Contest, Sequence[Side], dict[str, Any]]: ...

    def check(self) -> None: ...

    def clean(self) -> None: ...


def serve(make_jobs: Callable[[], JobSource], events_fd: int) -> int:
    """Does job after job until standard input ends; the exit status, which nobody needs."""
    with os.fdopen(events_fd, "w") as events:

        def send(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            jobs = make_jobs()
        except command.InputError as error:
            send(refused=str(error))
            return 1
        send(hello={"environment": jobs.environment, "names": jobs.names})
        for line in sys.stdin:
            try:
                send(**_done(jobs, **json.loads(line), send=send))
            except LostDeviceError as loss:
                side, reason = loss.args
                send(lost=reason, side=side)
                return 1
            send(side=None, step=CLEAN)
            jobs.clean()
            send(ready=True)
        return 0


def _done(
    jobs: JobSource,
    send: Callable[..., None],
    kind: str,
    name: str,
    seconds: float | None,
    without: dict[str, str],
) -> dict[str, Any]:
    """`entry` or `skipped`, and why; whatever the entry needed is garbage now."""
    send(side=None, step=DATA)
    try:
        contest, sides, sizes = jobs.make(kind, name)
    except FAILURES as failure:  # no room for the data, or no reference
        return {"skipped": one_line(failure)}

    def announce(side: str, step: str) -> None:
        send(side=side, step=step)

    records = compete(contest, sides, seconds, announce, jobs.check, without)
    return {"entry": {**sizes, "name": name, "num_bytes": contest.num_bytes, "sides": records}}


def die_with_parent() -> None:
    """Nothing else could end a process that waits for a kernel, and keeps the device from others."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # What the terminal or the system sends to both is for the parent to handle.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold all that is mapped


def main(arguments: list[str] | None = None, make_jobs: Callable[..., JobSource] | None = None) -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m experiments.kernel_speed.worker")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--events", type=int, required=True)
    options = parser.parse_args(arguments)
    os.set_inheritable(options.events, False)  # the compilers that are started must not keep it open
    return serve(lambda: (make_jobs or device_jobs)(options.quick, options.interpret), options.events)


def device_jobs(is_quick: bool, interpret: bool) -> JobSource:
    """Starts jax."""
    import jax

    from experiments.kernel_speed.jobs import Jobs, find_device

    device = find_device(interpret)
    jax.config.update("jax_default_device", device)
    return Jobs(device, is_quick, interpret)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a lost device cannot be taken down in order
