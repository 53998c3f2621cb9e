"""The GPU's block movement and append, interpreted with race detection, against their references.

Everything that must not be read is NaN, results are compared bit by bit, and the rings are made so small that
they go round.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu, reference
from pallas_kernels.mosaic_gpu import append, interpret, move_blocks
from tests.kernels.gpu_interpreter import run_interpreted

pytestmark = pytest.mark.contract

NUM_LAYERS, NUM_BLOCKS, NUM_IDS = 2, 11, 4
NOWHERE = 2**30
# (num_kv_heads, block_size, head_dim, dtype); chunks of less than a block, of uneven parts, of whole blocks.
POOLS = {
    "bf16_16x64": (2, 16, 64, "bfloat16"),
    "f16_24x128": (3, 24, 128, "float16"),
    "f32_8x256": (1, 8, 256, "float32"),
    "bf16_72x64": (1, 72, 64, "bfloat16"),
}


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Interprets a kernel: the first time jax imports modules that add to its configuration, and whatever was
    traced before is traced again."""
    run_interpreted(mosaic_gpu.append_kv, POOL, POOL, TOKENS, TOKENS, SLOTS, num_blocks=3, interpret=True)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch):
    """Two CTAs of three chunks, of 2 KiB at most."""
    monkeypatch.setattr(move_blocks, "MAX_CHUNK_BYTES", 2048)
    monkeypatch.setattr(move_blocks, "MAX_STAGES", 3)
    monkeypatch.setattr(move_blocks, "MAX_CTAS_PER_SM", 2)
    monkeypatch.setattr(move_blocks, "num_sms", lambda: 1)


def random(rng, dtype, *shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def random_pools(rng, name, owned):
    """K and V pools that are NaN but for the blocks `owned`, within each layer."""
    *shape, dtype = POOLS[name]
    pools = [np.full((NUM_LAYERS, NUM_BLOCKS, *shape), np.nan, np.float32) for _ in "kv"]
    for pool in pools:
        pool[:, owned] = rng.standard_normal(pool[:, owned].shape)
    return [jnp.asarray(pool.reshape(-1, *shape), dtype) for pool in pools]


def ids_of(values):
    """int32[NUM_IDS] of the values, between them ids that are no blocks."""
    ids = np.array([NOWHERE, NUM_BLOCKS, -1, NUM_BLOCKS + 3], np.int32)
    ids[np.arange(NUM_IDS) % 2 == 0 if len(values) == 2 else slice(len(values))] = values
    return jnp.asarray(ids)


def listed(values):
    """int32[NUM_IDS] that begin with the values; of the others, some are out of range."""
    return jnp.asarray([*values, *[5, NOWHERE, -1, 8][len(values) :]], jnp.int32)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    actual, expected = (np.atleast_1d(np.asarray(x)) for x in (actual, expected))
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def interpreted(name):
    """The kernel of that name, to be compiled."""
    return jax.jit(functools.partial(getattr(mosaic_gpu, name), num_blocks=NUM_BLOCKS, interpret=True))


def check_all(name, arguments, check):
    """Runs the kernel for two, no and all blocks: `arguments(num)` are its arguments."""
    traced = []

    @jax.jit
    def kernel(*values):
        traced.append(name)
        return interpreted(name)(*values)

    for num in (2, 0, NUM_IDS):
        values = arguments(num)
        before = [np.asarray(value).copy() for value in values]
        results = run_interpreted(kernel, *values)
        check(results, getattr(reference, name)(*values, num_blocks=NUM_BLOCKS))
        for value, old in zip(values, before, strict=True):
            assert_same_bits(value, old)  # nothing was donated, so nothing has changed
    assert traced == [name]  # no number is compiled for


@pytest.mark.quick_cases("bf16_16x64")
@pytest.mark.parametrize("name", POOLS)
def test_gather(name):
    rng = np.random.default_rng(0)
    ids = rng.permutation(NUM_BLOCKS)[:NUM_IDS]
    check_all(
        "gather_blocks", lambda num: (*random_pools(rng, name, ids[:num]), ids_of(ids[:num])), check_pools
    )


@pytest.mark.quick_cases("bf16_16x64")
@pytest.mark.parametrize("name", POOLS)
def test_scatter(name):
    rng = np.random.default_rng(1)
    *shape, dtype = POOLS[name]
    ids = rng.permutation(NUM_BLOCKS)

    def arguments(num):
        pools = random_pools(rng, name, ids[num:])
        block_ids = ids_of(ids[:num])
        is_block = np.isin(block_ids, ids)[:, None, None, None, None]
        blocks = [random(rng, dtype, NUM_IDS, NUM_LAYERS, *shape) for _ in "kv"]
        return *pools, *(jnp.where(is_block, each, jnp.nan) for each in blocks), block_ids

    check_all("scatter_blocks", arguments, check_pools)


@pytest.mark.quick_cases("bf16_16x64")
@pytest.mark.parametrize("name", POOLS)
def test_copy(name):
    rng = np.random.default_rng(2)
    ids = rng.permutation(NUM_BLOCKS)

    def arguments(count):
        src, dst = ids[:count], ids[NUM_IDS : NUM_IDS + count]
        pools = random_pools(rng, name, [*src, *ids[2 * NUM_IDS :]])
        others = jnp.full(NUM_IDS, ids[-1], jnp.int32).at[:count].set(dst)
        return *pools, listed(src), others, jnp.int32(count)

    check_all("copy_blocks", arguments, check_pools)


def check_pools(results, expected):
    for result, pool in zip(results, expected, strict=True):
        assert_same_bits(result, pool)


def test_one_source_may_be_copied_to_many():
    rng = np.random.default_rng(3)
    pools = random_pools(rng, "bf16_16x64", [5])
    ids = (jnp.full(NUM_IDS, 5, jnp.int32), jnp.asarray([7, 0, 10, 2], jnp.int32), jnp.int32(NUM_IDS))
    results = run_interpreted(interpreted("copy_blocks"), *pools, *ids)
    check_pools(results, reference.copy_blocks(*pools, *ids, num_blocks=NUM_BLOCKS))


@pytest.mark.quick_cases("bf16_16x64")
@pytest.mark.parametrize("name", POOLS)
def test_a_source_may_be_overwritten_by_a_later_copy(name, monkeypatch):
    """Earlier copies see it as it was, in every part of the block and every layer, however many CTAs fit."""
    monkeypatch.setattr(move_blocks, "MAX_CTAS_PER_SM", 3)
    pools = random_pools(np.random.default_rng(7), name, range(NUM_BLOCKS))
    ids = (jnp.asarray([5, 5, 2, 6], jnp.int32), jnp.asarray([7, 0, 5, 2], jnp.int32), jnp.int32(NUM_IDS))
    results = run_interpreted(interpreted("copy_blocks"), *pools, *ids)
    check_pools(results, reference.copy_blocks(*pools, *ids, num_blocks=NUM_BLOCKS))


def test_more_than_all_are_all():
    rng = np.random.default_rng(4)
    src, dst = jnp.asarray(rng.permutation(NUM_BLOCKS)[: 2 * NUM_IDS], jnp.int32).reshape(2, NUM_IDS)
    arguments = (*random_pools(rng, "bf16_16x64", src), src, dst, jnp.int32(9))
    results = run_interpreted(interpreted("copy_blocks"), *arguments)
    check_pools(results, reference.copy_blocks(*arguments, num_blocks=NUM_BLOCKS))


def test_blocks_are_cast_to_the_pools_dtype():
    rng = np.random.default_rng(5)
    pools = random_pools(rng, "bf16_16x64", range(NUM_BLOCKS))
    blocks = [random(rng, "float32", 1, NUM_LAYERS, 2, 16, 64) for _ in "kv"]
    arguments = (*pools, *blocks, jnp.asarray([6], jnp.int32))
    results = run_interpreted(interpreted("scatter_blocks"), *arguments)
    check_pools(results, reference.scatter_blocks(*arguments, num_blocks=NUM_BLOCKS))


def test_no_ids_move_nothing():
    pools = random_pools(np.random.default_rng(6), "bf16_16x64", [1])
    none, count = jnp.zeros(0, jnp.int32), jnp.int32(0)
    for blocks in interpreted("gather_blocks")(*pools, none):
        assert blocks.shape == (0, NUM_LAYERS, 2, 16, 64)
    empty = jnp.zeros((0, NUM_LAYERS, 2, 16, 64), "bfloat16")
    check_pools(interpreted("scatter_blocks")(*pools, empty, empty, none), pools)
    check_pools(interpreted("copy_blocks")(*pools, none, none, count), pools)
    tokens = jnp.zeros((0, 2, 64), "bfloat16")
    check_pools(interpreted("append_kv")(*pools, tokens, tokens, none), pools)


@pytest.mark.parametrize(
    ("heads", "block_size", "head_dim", "dtype", "rows", "stages", "ctas_per_sm"),
    [
        (8, 16, 128, "bfloat16", 64, 3, 2),
        (16, 512, 256, "bfloat16", 32, 3, 2),
        (1, 488, 64, "bfloat16", 122, 3, 2),
        (2, 24, 64, "float16", 48, 8, 2),
        (1, 8, 64, "bfloat16", 8, 8, 8),
        (8, 8, 256, "float32", 16, 3, 2),
    ],
)
def test_chunks_keep_enough_bytes_in_flight(
    heads, block_size, head_dim, dtype, rows, stages, ctas_per_sm, monkeypatch
):
    monkeypatch.undo()
    pool = jax.ShapeDtypeStruct((2 * 3, heads, block_size, head_dim), jnp.dtype(dtype))
    cut = move_blocks._cut(pool, 3, jax.ShapeDtypeStruct((512,), jnp.int32))
    assert (cut.num_layers, cut.rows, cut.stages) == (2, rows, stages)
    assert cut.rows * cut.chunks == heads * block_size
    assert cut.max_ctas == 132 * ctas_per_sm


@pytest.mark.quick_cases("3-bf16_16x64")
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("cta_tokens", [1, 3])
def test_append(name, cta_tokens, monkeypatch):
    # 8 tokens: with 3 in a CTA the last one reads tokens of its predecessor.
    monkeypatch.setattr(append, "_tokens_per_cta", lambda *_: cta_tokens)
    rng = np.random.default_rng(7)
    num_heads, block_size, head_dim, dtype = POOLS[name]
    pools = random_pools(rng, name, range(0, NUM_BLOCKS, 2))
    k, v = (random(rng, "float32", 8, num_heads, head_dim) for _ in "kv")
    end = NUM_BLOCKS * block_size
    slots = 1 + rng.permutation(end - 2)[:8]
    slots[[0, 1, 4, 5, 6]] = 0, -1, end, end - 1, NOWHERE
    arguments = (*pools, k.at[1].set(jnp.nan), v.at[6].set(jnp.nan), jnp.asarray(slots, jnp.int32))
    kernel = interpreted("append_kv")
    for layer in range(NUM_LAYERS):
        results = run_interpreted(kernel, *arguments, layer=jnp.int32(layer))
        check_pools(results, reference.append_kv(*arguments, num_blocks=NUM_BLOCKS, layer=layer))


def test_append_of_a_run_across_blocks(monkeypatch):
    monkeypatch.setattr(append, "_tokens_per_cta", lambda *_: 8)
    rng = np.random.default_rng(8)
    pools = random_pools(rng, "bf16_16x64", [3])
    k, v = (random(rng, "bfloat16", 19, 2, 64) for _ in "kv")
    slots = jnp.asarray([*range(3 * 16 + 9, 4 * 16), *range(9 * 16, 9 * 16 + 12)], jnp.int32)
    results = run_interpreted(interpreted("append_kv"), *pools, k, v, slots)
    check_pools(results, reference.append_kv(*pools, k, v, slots, num_blocks=NUM_BLOCKS))


@pytest.mark.parametrize(
    ("num_tokens", "token_bytes", "tokens"),
    [
        (1, 2048, 1),
        (1055, 2048, 1),
        (1056, 2048, 2),
        (100_000, 2048, 8),
        (100_000, 2**13, 4),
        (9999, 2**17, 1),
    ],
)
def test_tokens_of_one_cta(num_tokens, token_bytes, tokens):
    assert append._tokens_per_cta(num_tokens, token_bytes) == tokens


def test_a_race_is_an_error(monkeypatch):
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, **_: wait(0) if n == 0 else None)
    rng = np.random.default_rng(9)
    ids = jnp.asarray(rng.permutation(NUM_BLOCKS)[:NUM_IDS], jnp.int32)
    arguments = (*random_pools(rng, "bf16_16x64", ids), ids)
    with pytest.raises(interpret.RaceError, match="RACE DETECTED"):
        interpret.run_interpreted(interpreted("gather_blocks"), *arguments)
    monkeypatch.undo()
    run_interpreted(interpreted("gather_blocks"), *arguments)  # and the next kernel runs as ever


POOL = jnp.zeros((6, 2, 16, 64), jnp.bfloat16)
BLOCKS = jnp.zeros((4, 2, 2, 16, 64), jnp.bfloat16)
TOKENS = jnp.zeros((5, 2, 64), jnp.bfloat16)
SLOTS = jnp.arange(5, dtype=jnp.int32)
IDS = jnp.zeros(4, jnp.int32)
COUNT = jnp.int32(4)


def move_arguments(name, **changes):
    arguments = {
        "gather_blocks": {"k_pool": POOL, "v_pool": POOL, "block_ids": IDS},
        "scatter_blocks": {"k_pool": POOL, "v_pool": POOL, "k": BLOCKS, "v": BLOCKS, "block_ids": IDS},
        "copy_blocks": {"k_pool": POOL, "v_pool": POOL, "src": IDS, "dst": IDS, "count": COUNT},
        "append_kv": {
            **{"k_pool": POOL, "v_pool": POOL, "k": TOKENS, "v": TOKENS},
            **{"slots": SLOTS},
        },
    }[name]
    return {**arguments, "num_blocks": 3, **changes}


KERNELS = ("gather_blocks", "scatter_blocks", "copy_blocks", "append_kv")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (
            (6, 2, 16, 64),
            "int8",
            "the pools are int8, expected bfloat16 or float16 or float32",
        ),
        ((6, 2, 16, 80), "bfloat16", "head_dim is 80, expected 64 or 128 or 256"),
        ((6, 2, 12, 64), "bfloat16", "block_size is 12, expected a multiple of 8 up to 512"),
        ((6, 2, 520, 64), "bfloat16", "block_size is 520, expected a multiple of 8 up to 512"),
    ],
)
def test_refused_pools(name, shape, dtype, message):
    pool = jnp.zeros(shape, dtype)
    changes = {"k_pool": pool, "v_pool": pool}
    if name == "scatter_blocks":
        changes |= dict.fromkeys("kv", jnp.zeros((4, 2, *shape[1:]), dtype))
    if name == "append_kv":
        changes |= dict.fromkeys("kv", jnp.zeros((5, shape[1], shape[3]), dtype))
    with pytest.raises(ValueError, match=message):
        getattr(mosaic_gpu, name)(**move_arguments(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *((name, {"v_pool": POOL[:3]}, "expected two equal") for name in KERNELS),
        *((name, {"num_blocks": 4}, "expected a multiple of num_blocks = 4") for name in KERNELS),
        ("copy_blocks", {"count": jnp.float32(1)}, "expected an int32 scalar"),
        ("copy_blocks", {"count": IDS}, "expected an int32 scalar"),
        ("gather_blocks", {"block_ids": IDS[None]}, r"block_ids is int32\(1, 4\), expected int32\[n\]"),
        ("scatter_blocks", {"block_ids": IDS.astype("uint32")}, "block_ids is uint32"),
        ("scatter_blocks", {"v": BLOCKS[:1]}, r"v has shape \(1, 2, 2, 16, 64\), expected"),
        ("copy_blocks", {"dst": IDS[:2]}, r"dst is int32\(2,\), expected int32\[4\]"),
        ("append_kv", {"k": TOKENS[:, :1]}, r"k has shape \(5, 1, 64\), expected"),
        ("append_kv", {"slots": IDS}, r"k has shape \(5, 2, 64\), expected .* \(4, 2, 64\)"),
        ("append_kv", {"slots": jnp.zeros(5)}, "slots is float32"),
    ],
)
def test_refused_arguments(name, changes, message):
    with pytest.raises(ValueError, match=message):
        getattr(mosaic_gpu, name)(**move_arguments(name, **changes))


def test_too_many_heads_to_append():
    pool, tokens = jnp.zeros((1, 257, 8, 64), "bfloat16"), jnp.zeros((1, 257, 64), "bfloat16")
    with pytest.raises(ValueError, match="257 key/value heads, expected at most 256"):
        mosaic_gpu.append_kv(pool, pool, tokens, tokens, jnp.zeros(1, jnp.int32), num_blocks=1)


def test_too_large_tokens_to_append():
    """K and V of a token must fit into shared memory."""
    pool, tokens = jnp.zeros((1, 114, 8, 256)), jnp.zeros((1, 114, 256))
    with pytest.raises(ValueError, match="keys of a token have 116736 bytes, expected at most 115712"):
        mosaic_gpu.append_kv(pool, pool, tokens, tokens, jnp.zeros(1, jnp.int32), num_blocks=1)
