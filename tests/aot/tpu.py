"""Compiles the TPU kernels for three generations of TPUs, without one.

    python -m tests.aot.tpu                 # all cases, as `make aot-tpu` does
    python -m tests.aot.tpu append scatter  # those with one of these words in their names

Needs libtpu, see `make .venv-tpu`. Exit status 1 if a program does not compile, costs more than its budget on
one of the generations, copies a pool, or does not update in place what it ought to.
"""

import argparse
import dataclasses
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels import mosaic_tpu
from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.mosaic_tpu import decode, prefill
from pallas_kernels.mosaic_tpu.append import MAX_CHUNK
from pallas_kernels.mosaic_tpu.decode import tile_len_of, vmem_bytes
from pallas_kernels.mosaic_tpu.limits import sublanes, tiled_bytes
from tests.aot.hlo import num_copies

# Read when libtpu starts: there is no TPU to ask for its surroundings.
SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_STDERR_LOG_LEVEL": "3",
}
TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
NUM_LAYERS, NUM_TOKENS = 4, 2**16  # of one layer's pool
HEADINGS = ("code", "vmem", "temporary", "seconds", "verdict")

# Code is straight within a tile or a token of all heads, and loops over rows, tiles, blocks and tokens. That
# of a tile is longer in float32 (each product in several), with 32 heads, 32 queries a head or a window, and
# longest with 64 queries a head; that of the plan with 119 rows. A tile's has no room for a second copy.
KIB = 1024
MOVE_CODE, APPEND_CODE, LAYERS_CODE = 96 * KIB, 160 * KIB, 320 * KIB
DECODE_CODE, LONG_DECODE_CODE, LONGEST_DECODE_CODE = 272 * KIB, 528 * KIB, 928 * KIB
PREFILL_CODE = 1152 * KIB  # of one head, in a loop over them
XLA_TEMPORARY_BYTES = 512 * KIB
"""What XLA keeps in HBM around a kernel beside large arrays: plans, leaders of chunks, its own."""


class Cost(NamedTuple):
    """Of a program, in bytes; as a budget, at most so many on each generation.

    Attributes:
      code: Generated, of the kernels and of XLA.
      vmem: Of the kernel that uses most of it.
      temporary: Of HBM, beside arguments and results.
    """

    code: int
    vmem: int
    temporary: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      name: Unique.
      function: Takes the pools first, and returns them first if they are updated in place.
      arguments: Shapes.
      budget: What it was designed to use.
      in_place: Whether the pools are donated and must be updated where they are.
    """

    name: str
    function: Callable
    arguments: tuple
    budget: Cost
    in_place: bool


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def pool_of(block_size: int, num_kv_heads: int = 8, head_dim: int = 128, dtype: str = "bfloat16"):
    shape = (NUM_LAYERS * (NUM_TOKENS // block_size), num_kv_heads, block_size, head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def decode_budget(pool: jax.ShapeDtypeStruct, q_shape: tuple[int, ...], code: int) -> Cost:
    """What the wrapper counts, and the softmax's weights, which tpu7x keeps beside the logits.

    Of HBM, the queries as the kernel reads them and both results as it writes them.
    """
    return _budget(pool, q_shape, code, q_shape[2], decode.MAX_TILE_LEN, num_weights=1, num_results=1)


def prefill_budget(pool: jax.ShapeDtypeStruct, q_shape: tuple[int, ...], code: int) -> Cost:
    """Likewise, with temporaries like the weights, and results that are turned when written."""
    return _budget(
        pool, q_shape, code, prefill.HEADS_AT_ONCE, prefill.MAX_TILE_LEN, num_weights=10, num_results=2
    )


def _budget(
    pool: jax.ShapeDtypeStruct,
    q_shape: tuple[int, ...],
    code: int,
    num_heads: int,
    max_tile_len: int,
    num_weights: int,
    num_results: int,
) -> Cost:
    num_rows, num_queries, num_kv_heads, group_size, head_dim = q_shape
    num_packed, float32 = num_queries * group_size, jnp.dtype(jnp.float32)
    tile_len = tile_len_of(pool, num_packed, num_heads, max_tile_len)
    weights = num_heads * tiled_bytes(num_packed, tile_len, float32)
    parts = ((head_dim, pool.dtype), *[(head_dim, float32), (1, float32)] * num_results)
    of_head = sum(tiled_bytes(num_packed, width, dtype) for width, dtype in parts)
    return Cost(
        code,
        sum(vmem_bytes(pool, num_packed, tile_len, num_heads)) + num_weights * weights,
        num_rows * num_kv_heads * of_head + XLA_TEMPORARY_BYTES,
    )


def append_budget(pool: jax.ShapeDtypeStruct, num_tokens: int) -> Cost:
    """A chunk's tiles, and its tokens while the next ones arrive."""
    _, num_kv_heads, _, head_dim = pool.shape
    token_bytes = num_kv_heads * head_dim * pool.dtype.itemsize
    tile_bytes = sublanes(pool.dtype) * token_bytes
    vmem = 2 * min(num_tokens, MAX_CHUNK) * (tile_bytes + 2 * token_bytes)
    return Cost(APPEND_CODE, vmem, XLA_TEMPORARY_BYTES)


def decode_case(
    name: str,
    kernel: Callable = mosaic_tpu.paged_decode,
    *,
    code: int = DECODE_CODE,
    block_size: int = 16,
    group_size: int = 4,
    num_queries: int = 1,
    num_rows: int = 32,
    columns: int = 128,
    has_sink_logits: bool = False,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    **statics: Any,
) -> Case:
    pool = pool_of(block_size, num_kv_heads, head_dim, dtype)
    options = DecodeOptions(NUM_TOKENS // block_size, head_dim**-0.5, **statics)
    q = jax.ShapeDtypeStruct((num_rows, num_queries, num_kv_heads, group_size, head_dim), pool.dtype)
    sinks = jax.ShapeDtypeStruct((num_kv_heads, group_size), jnp.float32) if has_sink_logits else None

    def attend(k_pool, v_pool, q, table, rows, layer, sink_logits):
        return kernel(q, k_pool, v_pool, table, rows, options, layer=layer, sink_logits=sink_logits)

    rows = DecodeRows(*[i32(num_rows)] * 5)
    arguments = (pool, pool, q, i32(num_rows, columns), rows, i32(), sinks)
    budget = prefill_budget if kernel is mosaic_tpu.paged_prefill else decode_budget
    return Case(name, attend, arguments, budget(pool, q.shape, code), in_place=False)


prefill_case = functools.partial(decode_case, kernel=mosaic_tpu.paged_prefill, code=PREFILL_CODE)


def move_case(kernel: Callable, *, num_moved: int = 64, has_values: bool = False) -> Case:
    pool = pool_of(16)
    values = [jax.ShapeDtypeStruct((num_moved, NUM_LAYERS, *pool.shape[1:]), pool.dtype)] * (2 * has_values)
    function = functools.partial(kernel, num_blocks=NUM_TOKENS // 16)
    is_copy = kernel is mosaic_tpu.copy_blocks
    ids = (i32(num_moved), i32(num_moved), i32()) if is_copy else (i32(num_moved),)
    in_place = kernel is not mosaic_tpu.gather_blocks
    budget = Cost(MOVE_CODE, vmem=0, temporary=0)  # from HBM to HBM
    return Case(f"{kernel.__name__}_{num_moved}", function, (pool, pool, *values, *ids), budget, in_place)


def append_case(name: str, *, num_tokens: int, block_size: int = 16, dtype: str = "bfloat16") -> Case:
    pool = pool_of(block_size, dtype=dtype)
    values = jax.ShapeDtypeStruct((num_tokens, 8, 128), pool.dtype)

    def append(k_pool, v_pool, k, v, slots, layer):
        return mosaic_tpu.append_kv(
            k_pool, v_pool, k, v, slots, num_blocks=NUM_TOKENS // block_size, layer=layer
        )

    arguments = (pool, pool, values, values, i32(num_tokens), i32())
    return Case(name, append, arguments, append_budget(pool, num_tokens), in_place=True)


def layers_case() -> Case:
    """All layers of a decode step in a scan: append, then attend."""
    num_rows, pool = 32, pool_of(16)
    num_blocks = NUM_TOKENS // 16

    def layers(k_pool, v_pool, q, table, rows, slots):
        def layer_of(carry, layer):
            k_pool, v_pool, q = carry
            k = q[:, 0, :, 0]
            k_pool, v_pool = mosaic_tpu.append_kv(
                k_pool, v_pool, k, k, slots, num_blocks=num_blocks, layer=layer
            )
            options = DecodeOptions(num_blocks, 128**-0.5)
            out, _ = mosaic_tpu.paged_decode(q, k_pool, v_pool, table, rows, options, layer=layer)
            return (k_pool, v_pool, out.astype(q.dtype)), None

        return lax.scan(layer_of, (k_pool, v_pool, q), jnp.arange(NUM_LAYERS))[0]

    q = jax.ShapeDtypeStruct((num_rows, 1, 8, 4, 128), pool.dtype)
    rows = DecodeRows(*[i32(num_rows)] * 5)
    arguments = (pool, pool, q, i32(num_rows, 128), rows, i32(num_rows))
    budgets = decode_budget(pool, q.shape, LAYERS_CODE), append_budget(pool, num_rows)
    return Case("layers", layers, arguments, Cost(*map(max, *budgets)), in_place=True)


CASES = (
    decode_case("decode_block_16_group_4"),
    decode_case("decode_block_64_group_1", block_size=64, group_size=1),
    decode_case("decode_block_128_group_8", block_size=128, group_size=8),
    decode_case("decode_32_heads", code=LONG_DECODE_CODE, num_kv_heads=32, group_size=1),
    decode_case("decode_head_256", num_kv_heads=4, head_dim=256),
    decode_case("decode_f32_block_8", code=LONG_DECODE_CODE, block_size=8, dtype="float32"),
    decode_case(
        "decode_8_queries_group_16", code=LONGEST_DECODE_CODE, num_queries=8, group_size=16, dtype="float32"
    ),
    decode_case(
        "decode_most_queries", code=LONGEST_DECODE_CODE, num_queries=8, num_kv_heads=32, group_size=8
    ),
    decode_case(
        "decode_most_logits",
        code=LONGEST_DECODE_CODE,
        num_queries=8,
        group_size=32,
        block_size=8,
        dtype="float32",
    ),
    decode_case("decode_large_table", code=LONG_DECODE_CODE, num_rows=119, columns=2048),
    decode_case(
        "decode_all",
        code=LONG_DECODE_CODE,
        block_size=64,
        group_size=8,
        num_queries=4,
        window=1000,
        num_sink_tokens=5,
        soft_cap=30.0,
        has_sink_logits=True,
    ),
    prefill_case("prefill_64_queries", num_queries=64),
    prefill_case("prefill_16_queries", num_queries=16, num_kv_heads=32, group_size=1),
    prefill_case("prefill_f32", num_queries=64, dtype="float32"),
    prefill_case(
        "prefill_f32_32_heads", num_queries=32, num_kv_heads=32, group_size=1, block_size=128, dtype="float32"
    ),
    prefill_case(
        "prefill_f32_block_512",
        num_queries=64,
        num_kv_heads=1,
        group_size=8,
        head_dim=256,
        block_size=512,
        dtype="float32",
    ),
    prefill_case("prefill_head_256", num_queries=32, head_dim=256, block_size=128),
    prefill_case(
        "prefill_all",
        num_rows=8,
        num_queries=128,
        num_kv_heads=1,
        group_size=16,
        block_size=64,
        window=1000,
        num_sink_tokens=5,
        soft_cap=30.0,
        has_sink_logits=True,
    ),
    move_case(mosaic_tpu.gather_blocks),
    move_case(mosaic_tpu.scatter_blocks, has_values=True),
    move_case(mosaic_tpu.copy_blocks),
    append_case("append_1", num_tokens=1),
    append_case("append_64", num_tokens=64),
    append_case("append_2048_block_128", num_tokens=2048, block_size=128),
    append_case("append_f32", num_tokens=64, dtype="float32"),
    layers_case(),
)


def compile_for(target: str, case: Case) -> jax.stages.Compiled:
    device = topologies.get_topology_desc(platform="tpu", topology_name=target).devices[0]
    placed = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), case.arguments
    )
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=abstract)):
        jitted = jax.jit(case.function, donate_argnums=(0, 1) if case.in_place else ())
        return jitted.lower(*arguments).compile()


def used_vmem_bytes(hlo: str) -> int:
    """Of the kernel that uses most of it; libtpu writes 1 for VMEM."""
    calls = [line for line in hlo.splitlines() if "tpu_custom_call" in line]
    used = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
    return max(int(size) for call in calls for size in used.findall(call))


def failures(case: Case, cost: Cost, num_pool_copies: int, alias_bytes: int) -> list[str]:
    """What is wrong with the program, a phrase each."""
    found = [
        f"{value} {name} bytes, at most {most}"
        for name, value, most in zip(Cost._fields, cost, case.budget, strict=True)
        if value > most
    ]
    if num_pool_copies:
        found.append(f"copies a pool {num_pool_copies} times")
    pool = case.arguments[0]
    pool_bytes = pool.size * pool.dtype.itemsize
    if case.in_place and alias_bytes < 2 * pool_bytes:
        found.append(f"{2 * pool_bytes - alias_bytes} bytes not updated in place")
    return found


def report(target: str, case: Case, width: int) -> bool:
    """Prints the case's line; whether it passed."""
    start = time.monotonic()
    try:
        compiled = compile_for(target, case)
    except Exception as error:  # whatever the compiler raises is this case's verdict
        found, numbers = [f"{type(error).__name__}: {error}"], [""] * 3
    else:
        hlo, memory = compiled.as_text(), compiled.memory_analysis()
        cost = Cost(memory.generated_code_size_in_bytes, used_vmem_bytes(hlo), memory.temp_size_in_bytes)
        num_pool_copies = num_copies(hlo, case.arguments[0].size)
        found = failures(case, cost, num_pool_copies, memory.alias_size_in_bytes)
        numbers = list(cost)
    numbers.append(f"{time.monotonic() - start:.1f}")
    verdict = "FAILED: " + "; ".join(found) if found else "ok"
    print(f"{target:11} {case.name:{width}}", *(f"{n:>9}" for n in numbers), f" {verdict}", flush=True)
    return not found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles the TPU kernels for several TPUs.")
    parser.add_argument("words", nargs="*", metavar="word", help="only cases with it in their names")
    words = parser.parse_args(arguments).words or [""]
    cases = [case for case in CASES if any(word in case.name for word in words)]
    if not cases:
        parser.error(f"no case has {' or '.join(words)} in its name")
    jax.config.update("jax_platforms", "cpu")
    os.environ |= SURROUNDINGS
    width = max(len(case.name) for case in cases)
    print(f"Compiled by jax {jax.__version__}")
    print(" " * (12 + width), *(f"{heading:>9}" for heading in HEADINGS[:-1]), f" {HEADINGS[-1]}")
    start = time.monotonic()
    passed = [report(target, case, width) for target in TARGETS for case in cases]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed in {time.monotonic() - start:.0f} s")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
