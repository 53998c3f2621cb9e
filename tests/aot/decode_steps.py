"""Compiles decode steps of Llama 3.2 1B for H200: bytes that they move, launches, waits for the host.

    python -m tests.aot.decode_steps                 # all of them, as `make aot` does
    python -m tests.aot.decode_steps engine          # those with one of these words in their names
    python -m tests.aot.decode_steps --markdown      # the table for docs/measured.md

A step is one trip of a loop of your own, of `kv.generate`'s, or of the engine's, of 8 rows: an ordinary one,
or one that computes pieces of prompts beside the rows' next tokens. One is by a cascade, and one of 2
layers and a cache of int8. The layers are in stacks, or each by itself, as `models/` decodes on GPUs; the
limits are for these.

`waits` are those of a program as XLA runs it by default, which records all but loops as CUDA graphs. `driven`
are the loops and branches, rare ones included, that the host drives where graphs take loops in too, with
`XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE`. Seconds are of the CPU; without `--markdown` it
compiles in haste (`h200.start_compiler`). Needs the CUDA plugin's wheels, see `make .venv-aot`.
Exit status 1 if a step is beyond its limits or does not compile.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import kvcache_jax as kv
from kvcache_jax.engine.step import NEXT_TOKENS, WITH_PROMPTS
from models.decoder import Decoder, DecoderConfig, cache_config, forward, unstacked
from models.rope import Rope
from tests.aot import h200
from tests.aot.budget import i32
from tests.aot.loop_counts import step_counts
from tests.aot.program import shapes_of
from tests.aot.step_programs import decode, decode_arguments, serve, serve_arguments
from tests.aot.table import Table
from tests.aot.thunks import num_driven_by_host

WORKERS = 2
NUM_ROWS = 8
MODEL = DecoderConfig(
    vocab_size=128_256,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=16,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope=Rope(theta=500_000.0),
    tie_embeddings=True,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)
IN_GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE"
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""Reads matrices where they are, in their stacks."""
HEADINGS = (
    "step of",
    "layers",
    "launches",
    "at most",
    "waits",
    "driven",
    "MB read",
    "MB written",
    "of weights",
    "at most",
    "temporary",
    "lower s",
    "compile s",
    "verdict",
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step may have at most.

    Attributes:
      launches: Kernels, copies and library calls.
      waits: Loops that a step waits for, the one around it included, as XLA runs it by default.
      num_driven: Loops and branches that the host drives where CUDA graphs take loops in.
      traffic: Bytes read and written, in times of the weights, without those that attention reads of pools.
    """

    launches: int
    waits: int = 2
    num_driven: int = 0
    traffic: float = 1.1


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A loop around steps, to be compiled.

    Attributes:
      loop: Whose it is.
      layers: How the model's layers lie.
      function: Takes what `arguments` returns and is given the first one to update in place.
      arguments: Builds shapes of a cache's config and a decoder.
      config: Options of the cache.
      limits: See `Limits`; None where there are none.
      compiler_options: For XLA, beyond its defaults.
      part: Of the engine's step, the scope of the loops that it takes.
      num_layers: Of the model; None for all.
    """

    loop: str
    layers: str
    function: Callable
    arguments: Callable[[kv.CacheConfig, Decoder], tuple]
    config: Mapping[str, Any] = MappingProxyType({})
    limits: Limits | None = None
    compiler_options: Mapping[str, Any] = MappingProxyType({})
    part: str = NEXT_TOKENS
    num_layers: int | None = None

    @property
    def name(self) -> str:
        return f"{self.loop}, {self.layers}"

    @property
    def model(self) -> DecoderConfig:
        return dataclasses.replace(MODEL, num_layers=self.num_layers or MODEL.num_layers)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step costs; bytes and seconds."""

    launches: int
    waits: int
    num_driven: int
    read_bytes: int
    written_bytes: int
    temporary_bytes: int
    lower_seconds: float
    compile_seconds: float
    weight_bytes: int

    @property
    def traffic(self) -> float:
        """Bytes read and written in times of the weights."""
        return (self.read_bytes + self.written_bytes) / self.weight_bytes


def own_loop(cache: kv.Cache, decoder: Decoder, tokens: jax.Array, num_steps: jax.Array):
    """Decodes greedily, as in a loop of your own."""

    def step_fn(_, state):
        cache, tokens = state
        cache, step = kv.extend(cache, jnp.ones(NUM_ROWS, jnp.int32), max_new=1)
        logits, cache = forward(decoder, tokens[:, None], cache, step)
        return cache, jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, num_steps, step_fn, (cache, tokens))


def _own_loop_arguments(config: kv.CacheConfig, decoder: Decoder) -> tuple:
    return shapes_of(config), decoder, i32(NUM_ROWS), i32()


STACK, SINGLE, STACK_BY_CUBLAS = "stack", "single", "stack, two flags"
_OWN = functools.partial(DecodeStep, "your own loop", function=own_loop, arguments=_own_loop_arguments)
_GENERATE = functools.partial(DecodeStep, "generate", function=decode, arguments=decode_arguments)
_SERVE = functools.partial(
    DecodeStep,
    function=serve,
    arguments=serve_arguments,
    config=MappingProxyType({"enable_prefix_caching": True}),
)
_ENGINE = functools.partial(_SERVE, "engine")
_PROMPTS = functools.partial(_SERVE, "engine, 256 tokens of prompts", part=WITH_PROMPTS)
_INT8 = functools.partial(
    DecodeStep,
    "your own loop, 2 layers, int8 cache",
    function=own_loop,
    arguments=_own_loop_arguments,
    config=MappingProxyType({"quantise": lambda kind: kv.Quantised(kind, "int8")}),
    num_layers=2,
)
_CASCADE = functools.partial(
    DecodeStep,
    "your own loop, cascade",
    function=own_loop,
    arguments=_own_loop_arguments,
    config=MappingProxyType({"implementation": "mosaic_gpu_cascade"}),
)
STEPS = (
    _OWN(STACK),
    _OWN(STACK_BY_CUBLAS, compiler_options=MappingProxyType(BY_CUBLAS)),
    _OWN(SINGLE, limits=Limits(launches=257)),
    _GENERATE(STACK),
    _GENERATE(SINGLE, limits=Limits(launches=300)),
    _ENGINE(STACK, limits=Limits(launches=503, waits=4, num_driven=7, traffic=2.7)),
    _ENGINE(SINGLE, limits=Limits(launches=308, waits=4)),
    _PROMPTS(SINGLE, limits=Limits(launches=492, waits=10, traffic=1.75)),
    # A layer more has 21 launches more, with XLA's scatters in place of the kernel's 22, of bfloat16 14. XLA
    # copies the blocks of 8 bits, in a loop.
    _INT8(SINGLE, limits=Limits(launches=75, waits=3)),
    _CASCADE(SINGLE, limits=Limits(launches=356)),
)


def decoder_shapes(model: DecoderConfig, is_stacked: bool = True) -> Decoder:
    """The model's shapes."""

    def make() -> Decoder:
        decoder = Decoder(model, rngs=nnx.Rngs(0))
        return decoder if is_stacked else unstacked(decoder)

    return jax.eval_shape(make)


@functools.cache
def weight_bytes(model: DecoderConfig) -> int:
    """Of all parameters, which a step reads once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(decoder_shapes(model)))


def arguments_of(step: DecodeStep) -> tuple:
    """Shapes of the arguments of a step's function."""
    sizes = dict(num_blocks=512 * NUM_ROWS, max_seqs=NUM_ROWS, max_seq_len=8192, max_query_len=256)
    config = cache_config(step.model, **sizes, **{"implementation": "mosaic_gpu", **step.config})
    return step.arguments(config, decoder_shapes(step.model, step.layers != SINGLE))


def compile_step(name: str, folder: pathlib.Path, in_haste: bool) -> StepCost:
    """Compiles the step of that name, in a process of its own.

    Args:
      name: Of a step.
      folder: Exists and is empty; takes XLA's dump.
      in_haste: See `h200.start_compiler`.
    """
    flags = IN_GRAPHS, f"--xla_dump_to={folder}", "--xla_dump_hlo_module_re=jit_"
    h200.start_compiler(*flags, in_haste=in_haste)
    step = next(step for step in STEPS if step.name == name)
    arguments = h200.place(arguments_of(step))
    with h200.lowering():
        times = [time.process_time()]
        lowered = jax.jit(step.function, donate_argnums=0).lower(*arguments)
        times.append(time.process_time())
        compiled = lowered.compile(compiler_options=dict(step.compiler_options))
        times.append(time.process_time())
    counts = step_counts(compiled.as_text(), step.part)
    (thunks,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    return StepCost(
        counts.launches,
        1 + counts.loops,
        num_driven_by_host(thunks.read_text()),
        counts.read_bytes,
        counts.written_bytes,
        compiled.memory_analysis().temp_size_in_bytes,
        times[1] - times[0],
        times[2] - times[1],
        weight_bytes(step.model),
    )


def costs(steps: Sequence[DecodeStep], in_haste: bool) -> Iterator[StepCost | BaseException]:
    """Yields each step's cost, or what the compiler raised, in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.decoder"])
    with (
        tempfile.TemporaryDirectory(prefix="aot-") as temporary,
        concurrent.futures.ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1) as executor,
    ):
        folders = [pathlib.Path(temporary, str(nth)) for nth in range(len(steps))]
        for folder in folders:
            folder.mkdir()
        places = zip((step.name for step in steps), folders, strict=True)
        futures = [executor.submit(compile_step, *place, in_haste) for place in places]
        for future in futures:
            yield future.exception() or future.result()


def failures(cost: StepCost, limits: Limits | None) -> list[str]:
    """What is wrong with a step, a phrase each."""
    if limits is None:
        return []
    return [
        f"{value:,} {what}, at most {most:,}"
        for value, what, most in (
            (cost.launches, "launches", limits.launches),
            (cost.waits, "waits", limits.waits),
            (cost.num_driven, "loops and branches driven by the host", limits.num_driven),
            (round(cost.traffic, 3), "times the weights moved", limits.traffic),
        )
        if value > most
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles decode steps for H200 and counts what they cost.")
    parser.add_argument("words", nargs="*", metavar="word", help="only steps with it in their names")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if not options.words or any(word in step.name for word in options.words)]
    if not steps:
        parser.error(f"no step has {' or '.join(options.words)} in its name")
    jax.config.update("jax_platforms", "cpu")
    labels = [(step.loop, step.layers) for step in steps]
    table = Table(HEADINGS, list(zip(*labels, strict=True)), options.markdown)
    print(f"Compiled for H200 by jax {jax.__version__}; the weights are {weight_bytes(MODEL) / 1e9:.3f} GB\n")
    print(table.head())
    start, num_failed = time.monotonic(), 0
    for step, cost in zip(steps, costs(steps, not options.markdown), strict=True):
        most = step.limits
        if isinstance(cost, StepCost):
            found = failures(cost, most)
            numbers = [cost.launches, most and most.launches, cost.waits, cost.num_driven]
            numbers += [round(cost.read_bytes / 1e6), round(cost.written_bytes / 1e6)]
            numbers += [f"{cost.traffic:.3f}", most and most.traffic, cost.temporary_bytes]
            numbers += [f"{cost.lower_seconds:.1f}", f"{cost.compile_seconds:.1f}"]
        else:
            found, numbers = [f"{type(cost).__name__}: {cost}"], [None] * 11
        num_failed += bool(found)
        verdict = "FAILED: " + "; ".join(found) if found else "ok"
        print(table.line([step.loop, step.layers, *numbers, verdict]), flush=True)
    seconds = time.monotonic() - start
    print(f"\n{len(steps) - num_failed} passed, {num_failed} failed in {seconds:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
