"""The parts of `experiments.first_gpu_run`, each for a process of its own.

    python -m experiments.first_gpu_run.parts PART [--share K/N] [--interpret]

Prints a JSON object with `sides`, the records of each, for each contest as soon as it is over (see
`experiments.kernel_speed.timing`), after one with the `environment`.
"""

import argparse
import functools
import gc
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common.command import Parser, run
from experiments.kernel_speed import step
from experiments.kernel_speed.cells import TINY_STEPS, StepSizes
from experiments.kernel_speed.entries import environment, find_device
from experiments.kernel_speed.moves import TINY_POOLS, Pools, move_makers
from experiments.kernel_speed.names import OURS, XLA_ATTENTION
from experiments.kernel_speed.timing import Contest, Program, Side, compete, compiled
from kvcache_jax.core.backends import MOSAIC_GPU, XLA
from models.decoder import cache_config, forward, unstacked
from pallas_kernels import reference
from pallas_kernels.shapes import DECODE_SHAPES, DecodeShape

Contests = Iterator[tuple[Contest, list[Side], float | None]]
"""What is to be done, by whom, and seconds for its samples, None where it is only checked."""

DECODE_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3}
"""Of outputs and of their logs of sums: twice the rounding of outputs of about 2."""
MERGE_TOLERANCE, LOGPROB_TOLERANCE = 1e-5, 0.1
STEPS = (StepSizes(8, 2048), StepSizes(32, 8192))
SECONDS = 2.0
STACK, TUPLE = "layers in a stack", "layers in a tuple"


def kernels(interpret: bool, share: int = 0, num_shares: int = 1) -> Contests:
    """Checks all named shapes of decoding, the merge and the movements; what is not to be read is NaN."""
    sizes = TINY_POOLS if interpret else Pools()
    moves = move_makers(sizes, (3,) if interpret else (1, 128), 2 if interpret else 512, interpret)
    shapes = DECODE_SHAPES[:1] if interpret else DECODE_SHAPES
    decodes = (functools.partial(_decode, shape, interpret) for shape in shapes)
    for make in [*decodes, functools.partial(_merge, interpret), *moves.values()][share::num_shares]:
        yield *make(), None


def steps(interpret: bool, layers: str) -> Contests:
    """Times whole decode steps, checked against float32."""
    decoder = step.make_decoder(step.TINY if interpret else step.LLAMA_1B)
    for sizes in TINY_STEPS if interpret else STEPS:
        yield (
            *step.step_contest(decoder, sizes, interpret, unstacked if layers == TUPLE else lambda x: x),
            None if interpret else SECONDS,
        )


def serving(interpret: bool) -> Contests:
    """Times `generate` and the engine by kernels and by XLA; `score` checks their log-probabilities."""
    decoder = step.make_decoder(step.TINY if interpret else step.LLAMA_1B)
    num_prompts, prompt_len, max_new = (2, 20, 4) if interpret else (8, 512, 128)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, decoder.config.vocab_size, (num_prompts, prompt_len)).tolist()
    config = functools.partial(
        cache_config, decoder.config, max_seqs=num_prompts, max_seq_len=prompt_len + max_new, block_size=16
    )

    def error_of(answers: list[tuple[list[int], list[float]]]) -> float:
        errors = []
        for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
            assert len(tokens) == max_new
            scored = kv.score(forward, decoder, prompt, [tokens, tokens[:1]], config(implementation=XLA))
            errors.append(np.abs(np.asarray(logprobs) - scored.logprobs[0]))
        return float(np.max(errors))

    def generate(implementation: str) -> list:
        found = kv.generate(
            forward, decoder, prompts, config(implementation=implementation), max_new_tokens=max_new
        )
        return [(list(each.tokens), list(each.logprobs)) for each in found.generations]

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

    for name, work in (("generate", generate), ("engine", serve)):
        title = f"{name}: {num_prompts} prompts of {prompt_len} tokens, {max_new} new; a launch is all"
        sides = [
            Side(OURS, functools.partial(_served, work, MOSAIC_GPU, interpret), is_ours=True),
            Side(XLA_ATTENTION, functools.partial(_served, work, XLA, False)),
        ]
        yield Contest(title, 0, error_of, LOGPROB_TOLERANCE, 1), sides, None if interpret else SECONDS


PARTS: dict[str, Callable[..., Contests]] = {
    "kernels": kernels,
    "stack": functools.partial(steps, layers=STACK),
    "tuple": functools.partial(steps, layers=TUPLE),
    "serving": serving,
}


def _served(work: Callable[[str], list], implementation: str, interpret: bool, _: int) -> Program:
    def run_it() -> list:
        if not interpret:
            return work(implementation)
        from pallas_kernels.mosaic_gpu.interpret import run_interpreted

        with kv.testing.interpreted():
            return run_interpreted(lambda: work(implementation))

    return Program(run_it, lambda _: None, lambda answers: answers)


def _decode(shape: DecodeShape, interpret: bool) -> tuple[Contest, list[Side]]:
    problem = shape.problem()
    arrays = problem._replace(options=None)

    def call(function: Callable, arrays: Any, **options: Any) -> Any:
        more = {"layer": arrays.layer, "sink_logits": arrays.sink_logits}
        return function(*arrays[:5], problem.options, **more, **options)

    expected = jax.jit(functools.partial(call, reference.paged_decode))(arrays)
    return _checked(
        f"decode: {shape.name}",
        "paged_decode",
        call,
        arrays,
        expected,
        DECODE_TOLERANCE[shape.dtype],
        interpret,
    )


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
        from pallas_kernels.mosaic_gpu.interpret import run_interpreted

        options = {"interpret": True} if interpret else {}
        program = compiled(functools.partial(call, getattr(mosaic_gpu, kernel), **options), arrays)
        work = functools.partial(program, arrays)
        return Program(
            functools.partial(run_interpreted, work) if interpret else work,
            jax.block_until_ready,
            lambda x: x,
        )

    return Contest(name, 0, error_of, tolerance, 1), [Side(OURS, prepare, is_ours=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("experiments.first_gpu_run.parts", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--interpret", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--share", metavar="K/N", help="of kernels: the K-th share of N, K from 0")
    options: argparse.Namespace = parser.parse_args(arguments)
    share = tuple(map(int, options.share.split("/"))) if options.share else ()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = find_device(options.interpret)
    jax.config.update("jax_default_device", device)
    print(json.dumps({"environment": environment(device)}), flush=True)
    for contest, sides, seconds in PARTS[options.part](options.interpret, *share):
        records = compete(contest, sides, seconds)
        print(
            json.dumps({"name": contest.name, "num_bytes": contest.num_bytes, "sides": records}), flush=True
        )
        gc.collect()
    return 0


if __name__ == "__main__":
    run(main)
