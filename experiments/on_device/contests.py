"""How `experiments.first_gpu_run` times: sides that do the same work take turns, each checked before.

A sample is many launches, enqueued at once and waited for at the end, on the host's clock, divided by their
number; nothing is subtracted. What the host does between launches therefore counts only where the device
waits for it. Each launch reads other buffers than the one before, so that no cache serves them.
"""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.common.timing import summary

READ, COPY, FLOOR = "read", "copy", "one tiny kernel"
"""The ceilings."""
OURS, WITH_PLAN, CASCADE = "ours", "ours, plan included", "cascade by ours"
GATHER_CUDNN, GATHER_XLA = "gather + cuDNN", "gather + XLA"
FA2, FA2_TENSOR_CORES = "FlashInfer fa2", "FlashInfer fa2, tensor cores"
FLASHINFER_CUDNN, XQA = "FlashInfer cuDNN", "FlashInfer XQA"
XLA, PYTORCH, XLA_ATTENTION = "XLA", "PyTorch", "XLA attention"
SIDES = (
    *(OURS, WITH_PLAN, CASCADE, GATHER_CUDNN, GATHER_XLA, FA2, FA2_TENSOR_CORES, FLASHINFER_CUDNN, XQA),
    *(XLA, PYTORCH, XLA_ATTENTION),
)
"""As printed, and as `--without` takes them."""

MEASURED, CHECKED, WRONG, FAILED = "measured", "checked, not measured", "wrong", "failed"
MIN_ROUNDS, MAX_ROUNDS = 5, 50
SAMPLE_S = 0.01
MAX_LAUNCHES = 256

MAKING, FREEING = "making the data", "freeing the memory"
"""Steps of a contest."""
PREPARE, LAUNCH, COMPARE, SAMPLE = "preparing", "the first launches", "comparing", "a sample"
"""Steps of a side."""
FAILURES = (Exception, SystemExit)
"""A library may end the process when it is imported or does not support something."""


class Program(NamedTuple):
    """A number of launches; `note` is what a reader of the figures must know.

    Attributes:
      run: () -> handle; enqueues all of them and returns.
      wait: (handle) blocks until they are done.
      result: (handle) -> what the last of them computed.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    result: Callable[[Any], Any]
    note: str = ""


class Side(NamedTuple):
    """One who takes part; `prepare`, given the number of launches, compiles a program or raises."""

    name: str
    prepare: Callable[[int], Program]
    is_ours: bool = False


class Contest(NamedTuple):
    """What all sides are to do.

    Attributes:
      name: As printed.
      num_bytes: That one launch must read and write, each once.
      error_of: (result) -> how far it is from the reference, at most `tolerance`.
      num_launches: Of a sample.
      is_cell: A decode whose sides are compared with each other.
    """

    name: str
    num_bytes: int
    error_of: Callable[[Any], float]
    tolerance: float
    num_launches: int
    is_cell: bool = False


Makers = dict[str, Callable[[], tuple[Contest, list[Side]]]]
"""Contests by name, the most important ones first; nothing is on the device before one is made."""


def compiled(function: Callable, *arguments: Any, **options: Any) -> Callable:
    """`function` compiled for these arguments; `options` are of `jax.jit`."""
    import jax

    return jax.jit(function, **options).lower(*arguments).compile()


def jax_program(
    run: Callable[[], Any], interpret: bool = False, result: Callable[[Any], Any] | None = None
) -> Program:
    """Launches by jax, whose kernels are interpreted on the CPU if so; the result is an array of numpy's."""
    import jax
    import numpy as np

    if interpret:
        from pallas_kernels.mosaic_gpu.interpret import run_interpreted

        run = functools.partial(run_interpreted, run)
    return Program(run, jax.block_until_ready, result or np.asarray)


def launches_for(num_bytes: float, bytes_per_s: float = 3.5e12, fixed_s: float = 10e-6) -> int:
    """Launches of a sample of about `SAMPLE_S` seconds, at least 2."""
    return min(MAX_LAUNCHES, max(2, math.ceil(SAMPLE_S / (num_bytes / bytes_per_s + fixed_s))))


def compete(
    contest: Contest,
    sides: Sequence[Side],
    seconds: float | None,
    announce: Callable[[str, str], None] = lambda side, step: None,
    check_device: Callable[[], None] = lambda: None,
    without: Mapping[str, str] = MappingProxyType({}),
) -> list[dict]:
    """Checks all sides, then times those that are right, in turns.

    Args:
      contest: What is to be done.
      sides: Who does it.
      seconds: For all samples, at least `MIN_ROUNDS` of each side; None only checks.
      announce: (side, step) is called before a side does anything.
      check_device: Called when a side failed; raises if the device is lost, for what follows would fail in
        the name of another side.
      without: Sides that do not take part, and why.

    Returns a record per side, in order: `status`, the `reason` if it is not right, `error`, `first_call_s`
    (compiling, and the launches of one sample), and per launch the figures of `timing.summary`.
    """
    records, running = [], []
    for side in sides:
        record = {
            "side": side.name,
            "is_ours": side.is_ours,
            "status": FAILED,
            "reason": without.get(side.name, ""),
            "note": "",
            "error": None,
            "first_call_s": None,
            "launches_per_sample": contest.num_launches,
            "median_us": None,
        }
        records.append(record)
        if side.name in without:
            continue
        try:
            program = _checked(contest, side, record, announce)
        except FAILURES as failure:  # whatever stops a side is its verdict
            record |= {"status": FAILED, "reason": one_line(failure)}
            check_device()
            continue
        if program is not None:
            running.append((record, program, []))
        del program
    if seconds is not None:
        _time(contest, running, seconds, announce, check_device)
    return records


def _checked(contest: Contest, side: Side, record: dict, announce: Callable) -> Program | None:
    """The side's program, None if it is wrong; `record` says so."""
    start = time.perf_counter()
    announce(side.name, PREPARE)
    program = side.prepare(contest.num_launches)
    record["note"] = program.note
    announce(side.name, LAUNCH)
    handle = program.run()
    program.wait(handle)
    record["first_call_s"] = time.perf_counter() - start
    announce(side.name, COMPARE)
    error = contest.error_of(program.result(handle))
    record["error"] = error if math.isfinite(error) else None
    if error <= contest.tolerance:  # NaN is not
        record["status"] = CHECKED
        return program
    record["status"] = WRONG
    record["reason"] = f"off the reference by {error:.2g}, at most {contest.tolerance:g} expected"
    return None


def _time(
    contest: Contest, running: list, seconds: float, announce: Callable, check_device: Callable
) -> None:
    """Adds the figures; the first round warms up."""
    end, num_rounds = time.perf_counter() + seconds, 0
    while num_rounds <= MIN_ROUNDS or (num_rounds <= MAX_ROUNDS and time.perf_counter() < end):
        for entry in tuple(running):
            record, program, samples = entry
            announce(record["side"], SAMPLE)
            try:
                start = time.perf_counter()
                program.wait(program.run())
                sample = time.perf_counter() - start
            except FAILURES as failure:
                running.remove(entry)
                record |= {"status": FAILED, "reason": one_line(failure)}
                check_device()
                continue
            if num_rounds:
                samples.append(sample / contest.num_launches)
        num_rounds += 1
    for record, _, samples in running:
        record |= {"status": MEASURED, **summary(samples)}


def hold(
    makers: Makers,
    seconds: float | None,
    resume: Mapping[str, Any],
    check_device: Callable[[], None],
    clean: Callable[[], None],
) -> None:
    """Holds contest after contest, and says of each, once it is over, its `sides`, or why it was `skipped`.

    Before anything that may end or hang the process it says what is going to be `at` work. A lost device ends
    the process. Of processes before this one `resume` has names that are `done`, and `without`, by contest or
    for all by "*": sides that take no part, and why.
    """
    done, without = resume.get("done", ()), resume.get("without", {})
    try:
        for name in [name for name in makers if name not in done]:
            say(at=(name, None, MAKING))
            try:
                contest, sides = makers[name]()
            except FAILURES as failure:  # no room for the data, or no reference
                say(name=name, skipped=one_line(failure))
                continue
            announce = functools.partial(_announce, name)
            left_out = without.get("*", {}) | without.get(name, {})
            records = compete(contest, sides, seconds, announce, check_device, left_out)
            say(name=name, num_bytes=contest.num_bytes, is_cell=contest.is_cell, sides=records)
            say(at=(name, None, FREEING))
            del contest, sides
            clean()
    except FAILURES as failure:
        say(lost=one_line(failure))
        os._exit(1)  # a lost device cannot be taken down in order


def say(**what: Any) -> None:
    """Prints a line for `first_gpu_run`."""
    print(json.dumps(what), flush=True)


def _announce(name: str, side: str, step: str) -> None:
    say(at=(name, side, step))


def one_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    kind = type(failure).__name__
    return f"{kind}: {lines[0][:200]}" if lines else kind
