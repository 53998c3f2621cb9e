"""What is emulated (`python -m tests.aot.emulated`): named shapes of all kernels, and random decodes.

Whatever must not be read is NaN, in blocks that were given back as in rows that are not reached.
"""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mosaic_gpu, reference
from pallas_kernels.eight_bits import NUMBERS, WIDENED, Scaling
from pallas_kernels.mosaic_gpu import append, decode, move_blocks, prefill
from pallas_kernels.shapes import (
    DECODE_SHAPES,
    EIGHT_BIT_PREFILLS,
    EIGHT_BIT_SHAPES,
    PREFILL_SHAPES,
    DecodeShape,
)
from tests.aot.target import A100, B200, H200, L4, RTX_5090, Target

NUM_LAYERS, NUM_BLOCKS, NUM_IDS = 2, 11, 4
NOWHERE = 2**30
# (num_kv_heads, block_size, head_dim, dtype); chunks of less than a block, of uneven parts, of whole blocks.
POOLS = {
    "bf16_16x64": (2, 16, 64, "bfloat16"),
    "f16_24x128": (3, 24, 128, "float16"),
    "f32_8x256": (1, 8, 256, "float32"),
    "bf16_72x64": (1, 72, 64, "bfloat16"),
}
# Parts, and the axes of what is merged.
MERGES = {
    "one_part": (1, 5, 64),
    "3_parts": (3, 5, 64),
    "6_parts_126_lanes": (6, 2, 3, 7, 128),
    "head_256": (2, 33, 256),
}
# What GPUs without wgmma run of these, two of them without TMA, and a decode whose rings have one stage on an
# RTX 5090.
ELSEWHERE = {
    A100: (
        *(
            f"decode_{name}"
            for name in ("plain", "long", "idle_rows", "group_1_block_8", "drafts_7x16", "all")
        ),
        *("decode_of_32_bits", "merge_head_256", "gather_f16_24x128_3", "scatter_bf16_72x64_3"),
        "copy_bf16_16x64_4",
    ),
    L4: ("decode_head_128_block_24", "decode_sink_logits", "gather_bf16_16x64_3", "copy_f32_8x256_3"),
    B200: (
        *("decode_plain", "decode_long", "decode_drafts_7x16", "decode_fp8", "prefill_head_128_group_3"),
        "prefill_int8",
        "append_int8_16x64",
    ),
    RTX_5090: ("decode_all", "decode_int8_all", "prefill_plain"),
}
ONE_STAGE = DecodeShape("head_256_long", (200,), 1, group_size=7, head_dim=256, num_queries=2)
TOLERANCES = {"bfloat16": 5e-3, "float16": 5e-4}
"""Of what decodes give: weights are rounded to the pools' dtype before they meet the values."""
SMALL_GPU: dict[Any, dict[str, Any]] = {
    decode: dict(num_sms=lambda: 1),
    append: dict(num_sms=lambda: 1, _CTAS_PER_SM=1),
    move_blocks: dict(num_sms=lambda: 1, MAX_CTAS_PER_SM=2, MAX_STAGES=3, MAX_CHUNK_BYTES=2048),
}
"""Of modules: a GPU on which only long rows are split into several items, and rings go round."""


class Case(NamedTuple):
    """One call of a kernel.

    Attributes:
      name: Of the kernel and the shape.
      call: Calls it, without `jit`.
      expected: Computes what it ought to give, by the reference; NaN where nothing is to be written.
      rtol, atol: How exact it must be.
      target: The GPU.
    """

    name: str
    call: Callable[[], Any]
    expected: Callable[[], Any]
    rtol: float = 0.0
    atol: float = 0.0
    target: Target = H200


def cases(num_random: int, seed: int) -> list[Case]:
    """All named shapes, and so many random ones."""
    draw = random.Random(seed)
    plain = DECODE_SHAPES[0]
    here = [
        *(_decode(f"decode_{shape.name}", shape, shape.dtype) for shape in DECODE_SHAPES),
        *(_decode(f"decode_{shape.name}", shape, "bfloat16") for shape in EIGHT_BIT_SHAPES),
        _decode("decode_of_32_bits", plain, "float32"),
        *(_prefill(f"prefill_{shape.name}", shape) for shape in (*PREFILL_SHAPES, *EIGHT_BIT_PREFILLS)),
        *(_merge(f"merge_{name}", shape) for name, shape in MERGES.items()),
        *(_move(kernel, name, 3) for kernel in ("gather", "scatter", "copy") for name in POOLS),
        *(
            _move(kernel, "bf16_16x64", count)
            for kernel in ("gather", "scatter", "copy")
            for count in (0, NUM_IDS)
        ),
        *(_append(name, num_tokens) for name, num_tokens in zip(POOLS, (1, 7, 5, 19), strict=True)),
        *(_append_scaled(*each) for each in ((1, 16, 64, "int8", 5), (3, 24, 128, "uint8", 7))),
    ]
    named = {case.name: case for case in here}
    return [
        *here,
        *(_on(target, named[name]) for target, names in ELSEWHERE.items() for name in names),
        _on(RTX_5090, _decode(f"decode_{ONE_STAGE.name}", ONE_STAGE, ONE_STAGE.dtype)),
        *(_random(f"random_{seed}_{nth}", draw) for nth in range(num_random)),
    ]


def _decode(name: str, shape: DecodeShape, out_dtype: str) -> Case:
    return _attend(
        name, shape, out_dtype, functools.partial(decode.paged_decode, out_dtype=jnp.dtype(out_dtype))
    )


def _on(target: Target, case: Case) -> Case:
    if target is H200:
        return case
    model = target.gpu.example.replace(" ", "_").lower()
    return case._replace(name=f"{model}_{case.name}", target=target)


def _random(name: str, draw: random.Random) -> Case:
    shape = _random_shape(name, draw)
    return _on(draw.choice([H200, B200, RTX_5090, A100, L4]), _decode(f"decode_{name}", shape, shape.dtype))


def _prefill(name: str, shape: DecodeShape) -> Case:
    dtype = WIDENED if shape.dtype in NUMBERS else shape.dtype
    return _attend(name, shape, dtype, prefill.paged_prefill)


def _attend(name: str, shape: DecodeShape, out_dtype: str, kernel: Callable) -> Case:
    # Made when it is needed, for the arrays of all cases would be many.
    @functools.cache
    def problem():
        return shape.problem()

    def run(function: Callable) -> Any:
        each = problem()
        return function(*each[:6], **each.more)

    return Case(
        name,
        functools.partial(run, kernel),
        functools.partial(run, jax.jit(reference.paged_decode, static_argnums=5)),
        float(jnp.finfo(out_dtype).eps),
        TOLERANCES.get(shape.dtype, TOLERANCES["bfloat16"]),
    )


def _random_shape(name: str, draw: random.Random) -> DecodeShape:
    window = draw.choice([None, None, draw.randint(1, 200)])
    lens = [draw.choice([0, draw.randint(1, 40), draw.randint(1, 330)]) for _ in range(draw.randint(0, 2))]
    return DecodeShape(
        name,
        (draw.randint(1, 330), *lens),
        num_kv_heads=draw.choice([1, 2]),
        group_size=draw.choice([1, 2, 3, 4, 5, 7, 8, 16]),
        head_dim=draw.choice([64, 128, 128, 256]),
        block_size=draw.choice([8, 16, 24, 32, 40, 48, 64, 88, 128, 200, 256, 512]),
        num_queries=draw.choice([1, 1, 1, 2, 3, 5, 8]),
        dtype=draw.choice(list(TOLERANCES)),
        window=window,
        num_sink_tokens=draw.randint(0, 40) if window else 0,
        soft_cap=draw.choice([None, 20.0]),
        has_sink_logits=draw.random() < 0.4,
    )


def _merge(name: str, shape: tuple[int, ...]) -> Case:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal(shape).astype(np.float32)
    lses = 3 * rng.standard_normal(shape[:-1]).astype(np.float32)
    lses[0].reshape(-1)[::2] = -np.inf  # a part that saw nothing may hold anything
    outs[0].reshape(-1, shape[-1])[::2] = np.nan
    lses.reshape(shape[0], -1)[:, 1] = -np.inf
    arrays = jnp.asarray(outs), jnp.asarray(lses)
    call = functools.partial(mosaic_gpu.merge_attention, *arrays)
    return Case(name, call, functools.partial(jax.jit(reference.merge_attention), *arrays), 1e-5, 1e-5)


def _pools(rng: np.random.Generator, name: str, owned: np.ndarray) -> list[jax.Array]:
    """K and V pools that are NaN but for the blocks `owned`, within each layer."""
    *shape, dtype = POOLS[name]
    pools = [np.full((NUM_LAYERS, NUM_BLOCKS, *shape), np.nan, np.float32) for _ in "kv"]
    for pool in pools:
        pool[:, owned] = rng.standard_normal(pool[:, owned].shape)
    return [jnp.asarray(pool.reshape(-1, *shape), dtype) for pool in pools]


def _move(kernel: str, name: str, count: int) -> Case:
    """Of blocks. The ids after `count`, and of a gather or scatter all others, are no blocks."""
    rng = np.random.default_rng(count)
    *shape, dtype = POOLS[name]
    order = rng.permutation(NUM_BLOCKS).astype(np.int32)
    ids, others = np.array([NUM_BLOCKS, NOWHERE, -1, 8], np.int32), np.full(NUM_IDS, order[-1], np.int32)
    ids[:count], others[:count] = order[:count], order[NUM_IDS : NUM_IDS + count]
    arguments = _pools(rng, name, order[:count] if kernel == "gather" else order[[*range(count), -1, -2]])
    if kernel != "copy":
        ids[-1] = -NOWHERE if count < NUM_IDS else ids[-1]
        ids = np.roll(ids, 1)
    if kernel == "scatter":
        blocks = [rng.standard_normal((NUM_IDS, NUM_LAYERS, *shape)) for _ in "kv"]
        is_block = ((ids >= 0) & (ids < NUM_BLOCKS))[:, None, None, None, None]
        arguments += [jnp.asarray(np.where(is_block, block, np.nan), dtype) for block in blocks]
    arguments += [jnp.asarray(ids), *([jnp.asarray(others), jnp.int32(count)] if kernel == "copy" else [])]

    def call(module: Any) -> Any:
        return getattr(module, f"{kernel}_blocks")(*arguments, num_blocks=NUM_BLOCKS)

    calls = (functools.partial(call, module) for module in (mosaic_gpu, reference))
    return Case(f"{kernel}_{name}_{count}", *calls)


def _append(name: str, num_tokens: int) -> Case:
    """Of tokens, the last but one of which goes nowhere."""
    rng = np.random.default_rng(num_tokens)
    num_heads, block_size, head_dim, dtype = POOLS[name]
    pools = _pools(rng, name, np.arange(3))
    values = [jnp.asarray(rng.standard_normal((num_tokens, num_heads, head_dim)), dtype) for _ in "kv"]
    slots = rng.permutation(NUM_BLOCKS * block_size)[:num_tokens].astype(np.int32)
    slots[-2:-1] = NOWHERE
    arguments = (*pools, *values, jnp.asarray(slots))
    options = dict(num_blocks=NUM_BLOCKS, layer=1)
    return Case(
        f"append_{name}_{num_tokens}",
        functools.partial(mosaic_gpu.append_kv, *arguments, **options),
        functools.partial(reference.append_kv, *arguments, **options),
    )


def _append_scaled(num_heads: int, block_size: int, head_dim: int, dtype: str, num_tokens: int) -> Case:
    """Likewise, of 8 bits."""
    rng = np.random.default_rng(num_tokens)
    shape, shape_of_new = (NUM_LAYERS * NUM_BLOCKS, num_heads, block_size), (num_tokens, num_heads)

    def numbers(*shape: int) -> list[jax.Array]:
        return [jnp.asarray(rng.integers(0, 100, (*shape, head_dim)), dtype) for _ in "kv"]

    def scaling(*shape: int) -> Scaling:
        beside = [rng.integers(0, 2**16, shape) for _ in range(4)]
        dtypes = ["uint16", "uint16", "float32", "float32"] if dtype == "int8" else ["float32", "float32"]
        return Scaling(*(jnp.asarray(array, each) for array, each in zip(beside, dtypes, strict=False)))

    slots = rng.permutation(NUM_BLOCKS * block_size)[:num_tokens].astype(np.int32)
    slots[-2:-1] = NOWHERE
    pools = (*numbers(*shape), scaling(*shape))
    arguments = (*pools, *numbers(*shape_of_new), scaling(*shape_of_new), jnp.asarray(slots))

    def call(module: Any) -> list[jax.Array]:
        return jax.tree.leaves(module.append_scaled(*arguments, num_blocks=NUM_BLOCKS, layer=1))

    calls = (functools.partial(call, module) for module in (mosaic_gpu, reference))
    return Case(f"append_{dtype}_{block_size}x{head_dim}", *calls)
