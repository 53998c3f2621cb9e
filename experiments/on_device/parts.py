"""The parts of `experiments.first_gpu_run`, each for a process of its own.

    python -m experiments.on_device.parts PART [--share K/N] [--cell NAME] [--interpret] [--resume JSON]

Prints JSON objects, a line each: the `environment` and the `names` of all contests, then what `contests.hold`
says of them. `first_gpu_run` reads them.
"""

import argparse
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import timing
from experiments.common.command import InputError, Parser, run
from experiments.on_device import contests
from experiments.on_device.cells import QUICK, TINY, Cell, all_cells
from experiments.on_device.contests import OURS, Contest, Makers, Program, Side
from experiments.on_device.moves import TINY_POOLS, Pools, ceiling_makers, move_makers
from experiments.on_device.problem import TOLERANCE, error_of, expected_output, make_problem
from experiments.on_device.sides import jax_sides
from experiments.on_device.torch_sides import FLASHINFER_DIR, settle, torch_sides
from kvcache_jax.core.backends import MOSAIC_GPU, XLA
from pallas_kernels import reference
from pallas_kernels.gpus import gpu_of, left_out, served
from pallas_kernels.shapes import (
    DECODE_SHAPES,
    EIGHT_BIT_PREFILLS,
    EIGHT_BIT_SHAPES,
    PREFILL_SHAPES,
    DecodeShape,
)
from pallas_kernels.versions import untested_jax

DECODE_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3}
"""Of outputs and of their logs of sums: twice the rounding of outputs of about 2."""
MERGE_TOLERANCE, LOGPROB_TOLERANCE = 1e-5, 0.1
NUM_FIRST_CELLS = 6
"""Decodes before the movements have their turn."""
STACK, TUPLE = "layers in a stack", "layers in a tuple"


def kernels(interpret: bool, _: list[str]) -> Makers:
    """Checks all named shapes of attention, the merge and the movements; what is not to be read is NaN."""
    named = [("decode", DECODE_SHAPES), ("decode", EIGHT_BIT_SHAPES)]
    named += [("prefill", PREFILL_SHAPES), ("prefill", EIGHT_BIT_PREFILLS)]
    attends = {
        f"{kernel}: {shape.name}": functools.partial(_attend, kernel, shape, interpret)
        for kernel, shapes in named
        if shapes is DECODE_SHAPES or interpret or not _left_out()
        for shape in (shapes[:1] if interpret else shapes)
    }
    moves = _moves((3,) if interpret else (1, 128), interpret)
    return {**attends, "merge: 5 parts": functools.partial(_merge, interpret), **moves}


def steps(interpret: bool, _: list[str], layers: str) -> Makers:
    """Times whole decode steps, checked against float32."""
    from experiments.on_device import step  # needs flax
    from models.decoder import unstacked

    def make(sizes: step.StepSizes) -> tuple[Contest, list[Side]]:
        decoder = step.make_decoder(step.TINY if interpret else step.LLAMA_1B)
        return step.step_contest(decoder, sizes, interpret, unstacked if layers == TUPLE else lambda x: x)

    all_sizes = step.TINY_STEPS if interpret else step.STEPS
    return {sizes.name: functools.partial(make, sizes) for sizes in all_sizes}


def serving(interpret: bool, _: list[str]) -> Makers:
    """Times `generate` and the engine by kernels and by XLA; `score` checks their log-probabilities.

    Samples of prompts are also decoded by a cascade, which reads each prompt once for eight of them.
    """
    from experiments.on_device import step  # needs flax
    from models.decoder import cache_config, forward

    decoder = step.make_decoder(step.TINY if interpret else step.LLAMA_1B)
    num_prompts, prompt_len, max_new, num_samples = (2, 20, 4, 2) if interpret else (8, 512, 128, 8)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, decoder.config.vocab_size, (num_prompts, prompt_len)).tolist()
    config = functools.partial(
        cache_config, decoder.config, max_seqs=num_prompts, max_seq_len=prompt_len + max_new, block_size=16
    )
    config_of_samples = functools.partial(config, max_seqs=num_prompts * num_samples)

    def error_of(answers: list[tuple[list[int], list[float]]]) -> float:
        errors = []
        for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
            assert len(tokens) == max_new
            scored = kv.score(forward, decoder, prompt, [tokens, tokens[:1]], config(implementation=XLA))
            errors.append(np.abs(np.asarray(logprobs) - scored.logprobs[0]))
        return float(np.max(errors))

    def answers_of(found: Any) -> list:
        return [(list(each.tokens), list(each.logprobs)) for each in found.generations]

    def generate(implementation: str) -> list:
        sizes = config(implementation=implementation)
        return answers_of(kv.generate(forward, decoder, prompts, sizes, max_new_tokens=max_new))

    def draw_samples(implementation: str) -> list:
        sizes = config_of_samples(implementation=implementation)
        found = kv.generate(forward, decoder, prompts, sizes, max_new_tokens=max_new, num_samples=num_samples)
        return answers_of(found)[::num_samples]

    engines: dict[str, kv.Engine] = {}

    def serve(implementation: str) -> list:
        if implementation not in engines:
            engines[implementation] = kv.Engine(forward, decoder, config(implementation=implementation))
        engine = engines[implementation]
        answers: dict[Any, tuple[list[int], list[float]]] = {i: ([], []) for i in range(num_prompts)}
        engine.push(kv.GenerationRequest(prompt, max_new, id=i) for i, prompt in enumerate(prompts))
        for event in engine:
            tokens, logprobs = answers[event.id]
            tokens.extend(event.tokens)
            logprobs.extend(event.logprobs)
        return list(answers.values())

    def make(title: str, work: Callable[[str], list]) -> tuple[Contest, list[Side]]:
        def side(name: str, implementation: str, **options: Any) -> Side:
            return Side(name, functools.partial(_served, work, implementation, interpret), **options)

        sides = [side(OURS, MOSAIC_GPU, is_ours=True), side(contests.XLA_ATTENTION, XLA)]
        if work is draw_samples:
            sides.append(side(contests.CASCADE, f"{MOSAIC_GPU}_cascade"))
        return Contest(title, 0, error_of, LOGPROB_TOLERANCE, 1), sides

    ending = f"{num_prompts} prompts of {prompt_len} tokens, {max_new} new; a launch is all"
    titles = {f"generate: {ending}": generate, f"engine: {ending}": serve}
    titles[f"samples: {num_samples} of each of {ending}"] = draw_samples
    return {title: functools.partial(make, title, work) for title, work in titles.items()}


def speed(interpret: bool, beginnings: list[str]) -> Makers:
    """Times ceilings, decodes beside peers, and movements: a handful of cells, or all that begin so."""
    cells = TINY if interpret else all_cells() if beginnings else QUICK
    decodes = [(cell.name, functools.partial(_cell, cell, interpret)) for cell in cells]
    makers = {
        **(ceiling_makers(1 << 12) if interpret else ceiling_makers()),
        **dict(decodes[:NUM_FIRST_CELLS]),
        **_moves((3,) if interpret else (1, 128, 4096) if beginnings else (128,), interpret),
        **dict(decodes[NUM_FIRST_CELLS:]),
    }
    return {name: makers[name] for name in makers if not beginnings or name.startswith(tuple(beginnings))}


PARTS: dict[str, tuple[Callable[[bool, list[str]], Makers], float | None]] = {
    "kernels": (kernels, None),
    "stack": (functools.partial(steps, layers=STACK), 2.0),
    "tuple": (functools.partial(steps, layers=TUPLE), 2.0),
    "serving": (serving, 2.0),
    "speed": (speed, 0.6),
}
"""With the seconds for the samples of a contest, None where it is only checked."""


def _moves(num_tokens: tuple[int, ...], interpret: bool) -> Makers:
    num_tokens = num_tokens if interpret or not _left_out() else ()
    return move_makers(TINY_POOLS if interpret else Pools(), num_tokens, 2 if interpret else 512, interpret)


def _left_out() -> tuple[str, ...]:
    """Lists the kernels that are not for the GPU here."""
    device = jax.devices()[0]
    return left_out(device.device_kind, getattr(device, "compute_capability", None))


def _cell(cell: Cell, interpret: bool) -> tuple[Contest, list[Side]]:
    num_launches = 2 if interpret else contests.launches_for(cell.kv_bytes)
    problem = jax.block_until_ready(make_problem(cell, num_buffers=2 if interpret else None))
    expected = expected_output(problem, (num_launches - 1) % problem.num_buffers)
    wrong_by = functools.partial(error_of, expected=expected)
    contest = Contest(cell.name, cell.kv_bytes, wrong_by, TOLERANCE, num_launches, is_cell=True)
    return contest, [*jax_sides(problem, interpret), *torch_sides(problem)]


def _served(work: Callable[[str], list], implementation: str, interpret: bool, _: int) -> Program:
    def run_it() -> list:
        with kv.testing.interpreted() if interpret else contextlib.nullcontext():
            return work(implementation)

    return contests.jax_program(run_it, interpret, result=list)


def _attend(kernel: str, shape: DecodeShape, interpret: bool) -> tuple[Contest, list[Side]]:
    problem = shape.problem()
    arrays = problem._replace(options=None)

    def call(function: Callable, arrays: Any, **options: Any) -> Any:
        return function(*arrays[:5], problem.options, **arrays.more, **options)

    expected = jax.jit(functools.partial(call, reference.paged_decode))(arrays)
    name, tolerance = f"{kernel}: {shape.name}", DECODE_TOLERANCE[problem.q.dtype.name]
    return _checked(name, f"paged_{kernel}", call, arrays, expected, tolerance, interpret)


def _merge(interpret: bool) -> tuple[Contest, list[Side]]:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((5, 3, 8, 128)), 3 * rng.standard_normal((5, 3, 8))
    lses[0, ::2], outs[0, ::2] = -np.inf, np.nan  # a part that saw nothing may hold anything
    arrays = jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32)
    expected = jax.jit(reference.merge_attention)(*arrays)

    def call(function: Callable, arrays: Any, **options: Any) -> Any:
        return function(*arrays, **options)

    return _checked("merge: 5 parts", "merge_attention", call, arrays, expected, MERGE_TOLERANCE, interpret)


def _checked(
    name: str, kernel: str, call: Callable, arrays: Any, expected: Any, tolerance: float, interpret: bool
) -> tuple[Contest, list[Side]]:
    """Compares a kernel's outputs and logs of sums with those expected; -inf must be where it is expected."""

    def error_of(found: Any) -> float:
        errors = []
        for got, want in zip(found, expected, strict=True):
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            with np.errstate(invalid="ignore"):  # two infinities are as far apart as NaN says
                errors.append(np.where(got == want, 0, np.abs(got - want)).max(initial=0))
        return float(np.max(errors))

    def prepare(_: int) -> Program:
        from pallas_kernels import mosaic_gpu

        options = {"interpret": True} if interpret else {}
        program = contests.compiled(functools.partial(call, getattr(mosaic_gpu, kernel), **options), arrays)
        return contests.jax_program(functools.partial(program, arrays), interpret, result=tuple)

    return Contest(name, 0, error_of, tolerance, 1), [Side(OURS, prepare, is_ours=True)]


def environment(device: Any) -> dict[str, Any]:
    """Where and when; of packages that are not installed, nothing."""
    peers, folder = {}, os.environ.get(FLASHINFER_DIR)
    for package in ("torch", "flashinfer-python", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            peers[package] = importlib.metadata.version(package)
    return {
        "device": {
            "name": device.device_kind,
            "platform": device.platform,
            "compute_capability": getattr(device, "compute_capability", None),
            "runtime": device.client.platform_version.splitlines()[0],
            "driver": _driver() if device.platform == "gpu" else None,
        },
        "machine": timing.machine(),
        "revision": timing.revision(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "jax": jax.__version__,
        "packages": peers,
        "flashinfer_modules": sorted(path.stem for path in Path(folder).glob("*/*.so")) if folder else [],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() if lines else None


def find_device(interpret: bool) -> Any:
    """The device that is measured; an InputError where it is none that the kernels are for."""
    if reason := untested_jax():
        raise InputError(reason)
    advice = f"run it on one of compute capability {served()}, or see the path with --interpret --output DIR"
    try:
        device = jax.devices("cpu")[0] if interpret else jax.devices()[0]
    except RuntimeError as error:
        raise InputError(f"jax finds no device ({contests.one_line(error)}): {advice}") from error
    if interpret:
        return device
    if device.platform != "gpu":
        raise InputError(f"jax runs on {device.platform} here, expected an NVIDIA GPU: {advice}")
    capability = getattr(device, "compute_capability", None)
    if gpu_of(device.device_kind, capability) is None:
        raise InputError(f"{device.device_kind} of compute capability {capability} has no kernels: {advice}")
    return device


def check_device() -> None:
    """Raises if the device does not answer, as after an illegal access."""
    jax.block_until_ready(jnp.arange(8).sum())
    settle()


def clean() -> None:
    gc.collect()
    jax.clear_caches()
    check_device()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("experiments.on_device.parts", __doc__)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--interpret", action="store_true", help="tiny, on the CPU")
    add("--share", metavar="K/N", default="0/1", help="the K-th share of N, K from 0")
    add("--cell", action="append", default=[], help="of speed: what begins so")
    add("--resume", type=json.loads, default={}, metavar="JSON", help="what is done, and who takes no part")
    options: argparse.Namespace = parser.parse_args(arguments)
    # The peers need memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with parser.refusing():
        device = find_device(options.interpret)
    jax.config.update("jax_default_device", device)
    make, seconds = PARTS[options.part]
    makers = make(options.interpret, options.cell)
    if not makers:
        names = "; ".join([*make(options.interpret, [""])][:8])
        parser.error(f"got --cell {options.cell}, expected the beginning of a name: {names}; ...")
    nth, count = map(int, options.share.split("/"))
    names = [*makers][nth::count]
    contests.say(environment=environment(device), names=names)
    seconds = None if options.interpret else seconds
    contests.hold({name: makers[name] for name in names}, seconds, options.resume, check_device, clean)
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    run(main)
