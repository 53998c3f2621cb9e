"""Quantised layers: how far numbers are off, which bits are stored, and what attention makes of them.

A cache has a layer of each format, so that one program says it of all. `Stored` reads slots in its own words,
in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.config import config_from_json, config_to_json
from tests.support.attention_driver import dense_attention, fragment
from tests.support.helpers import assert_same, statuses

HEADS, HEAD_DIM, NUM_Q_HEADS = 2, 8, 4
LENGTH = 13  # of texts whose bits are compared, and the width of the steps that store them
FULL = kv.FullAttention(HEADS, HEAD_DIM)
WINDOW = kv.SlidingWindow(HEADS, HEAD_DIM, window=5)
SINKS = kv.SlidingWindow(HEADS, HEAD_DIM, window=5, num_sink_tokens=3)
FORMATS = (
    kv.Quantised(FULL, "int8"),
    kv.Quantised(FULL, "fp8"),
    kv.Quantised(FULL, "int4"),
    kv.Quantised(FULL, "int4", rotate=True),
)
LAYERS = (
    *FORMATS,
    kv.Quantised(WINDOW, "int8", rotate=True),
    kv.Quantised(SINKS, "int4"),
)
HADAMARD = np.array([[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)]) / np.sqrt(8)


def config_of(layers, block_size=4, **options):
    sizes = dict(max_seqs=4, max_seq_len=24, block_size=block_size)
    return kv.CacheConfig(layers, **sizes, **options)


class Stored:
    """What the slots of a row hold in one layer.

    Attributes:
      arrays: By name `[tokens, heads, ...]`, 0 where the row's blocks have left it.
    """

    def __init__(self, cache, row, layer):
        self.kind = cache.config.layers[layer]
        group_id, index = cache.config.locate(layer)
        group, length = cache.config.groups[group_id], int(cache.context_len[row])
        table = np.asarray(cache.control.block_pools[group_id].block_table)[row]
        slots = [(int(table[i // group.block_size]), i % group.block_size) for i in range(length)]
        self.arrays = {}
        for name, array in cache.pools[group_id].arrays.items():
            blocks = np.asarray(array)[index * group.num_blocks :]
            held = [blocks[block][:, at] if block < group.num_blocks else None for block, at in slots]
            nothing = np.zeros_like(blocks[0][:, 0])
            self.arrays[name] = np.stack([nothing if values is None else values for values in held])

    def decoded(self, name):
        """The numbers of "k" or "v", f64[tokens, heads, head_dim], turned if they are stored so."""
        return decode(self.kind, {part: self.arrays[full] for part, full in parts_of(self.kind, name)})


def parts_of(kind, name):
    """Names of what is stored of "k" or "v", beside those in which they are part of a format."""
    arrays = kind.arrays(4, jnp.float32)
    return [(full.removeprefix(name).lstrip("_"), full) for full in arrays if full.split("_")[0] == name]


def scale_of(kind, parts):
    """f64[...], that of integers from its 16 bits: 8 of exponent, 8 of fraction."""
    if kind.format == "fp8":
        return parts["scale"].astype(np.float64)
    bits = parts["scale"].astype(np.int64)
    scale = (1 + (bits & 255) / 256) * 2.0 ** ((bits >> 8) - 127.0)
    return np.where(bits >> 8 == 255, np.nan, scale)


def decode(kind, parts):
    scale = scale_of(kind, parts)[..., None]
    if kind.format == "int8":
        return parts[""] * scale + parts["offset"][..., None]
    if kind.format == "fp8":
        bits = parts[""].astype(np.int64)
        exponent, fraction = (bits >> 3) & 15, bits & 7
        size = np.where(
            exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent.astype(float) - 7)
        )
        return np.where(bits >= 128, -size, size) * scale
    numbers = np.stack([parts[""] & 15, parts[""] >> 4], axis=-1).reshape(*parts[""].shape[:-1], -1)
    return (numbers - 8.0) * scale + parts["offset"][..., None]


# ---------------------------------------------------------------------------------------
# numbers


def vectors():
    """f32[n, 1, head_dim] of all sizes and shapes that make trouble."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((200, HEAD_DIM)) * 10.0 ** rng.uniform(-12, 12, (200, 1))
    outlier = rng.standard_normal((50, HEAD_DIM))
    outlier[np.arange(50), rng.integers(HEAD_DIM, size=50)] *= 10.0 ** rng.uniform(1, 8, 50)
    sides = rng.uniform(-1, 1, (300, 1)) * 10.0 ** rng.uniform(-2, 2, (300, 1))  # of 0, or about it
    far = (sides + rng.uniform(0, 1, (300, HEAD_DIM))) * 10.0 ** rng.uniform(-9, 9, (300, 1))
    few = np.array(
        [
            [0.0] * 8,
            [-0.0] * 8,
            [1e-45] * 8,
            [3.4e38, -3.4e38] * 4,
            [3.4e38] * 8,
            [-3.4e38] + [0.0] * 7,
            [1e-9] * 8,
            [5.0] * 8,
            [-7.0] * 8,
            [1.0, 2, 3, 4, 5, 6, 7, 8],
            [0.0] * 7 + [1.0],
            [127.0, 126.5, 0.5, -0.5, 1.5, -126.5, -127.0, 2.5],
            np.linspace(10, 11, 8),
            np.linspace(-11, -10, 8),
        ]
    )
    return np.concatenate([normal, outlier, far, few]).astype(np.float32)[:, None]


@functools.cache
def coded(kind):
    """`vectors` as the kind stores keys of them, by part; and the k, k_scale and k_offset that it reads."""

    @jax.jit
    def run(x):
        arrays = kind.encode(k=x, v=-x)
        tile = {name: jnp.moveaxis(array, 0, 1) for name, array in arrays.items()}
        return arrays, kind.keys_values(tile)

    arrays, read = run(jnp.asarray(vectors()))
    parts = {part: np.asarray(arrays[name]) for part, name in parts_of(kind, "k")}
    read = (read.k, read.k_scale, 0 * read.k_scale if read.k_offset is None else read.k_offset)
    return parts, *(np.asarray(array[0], np.float64) for array in read)


def one_head(name):
    return kv.Quantised(kv.FullAttention(1, HEAD_DIM), name)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_number_is_off_by_half_a_step_of_the_range_of_its_vector_at_most(name):
    """Also where that range does not hold 0."""
    kind, x = one_head(name), vectors().astype(np.float64)
    parts, values, *_ = coded(kind)
    most = {"int8": 255, "int4": 15}[name]
    own = (x.max(-1) - x.min(-1)) / most
    step, found = np.maximum(own, 2.0**-100), scale_of(kind, parts)
    assert (found >= step * (1 - 1e-6)).all() and (found <= step * (1 + 1 / 256)).all()
    error, rounded = np.abs(decode(kind, parts) - x), np.abs(x).max(-1) * 2.0**-22  # of float32
    assert (error.max(-1) <= 0.503 * step + rounded).all()
    assert (np.abs(x).max(-1) > 5 * own * most).sum() > 50
    assert (values.min(), values.max()) == (-(most + 1) / 2, (most - 1) / 2)
    is_constant = (x.min(-1) == x.max(-1)) & ((x[..., 0] == 0) | (np.abs(x[..., 0]) > 1e-37))  # no subnormals
    np.testing.assert_array_equal(decode(kind, parts)[is_constant].astype(np.float32), x[is_constant])


def test_fp8_numbers_keep_four_bits():
    x, (parts, *_) = vectors().astype(np.float64), coded(one_head("fp8"))
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / 448, 2.0**-100)
    error = np.abs(decode(one_head("fp8"), parts) - x)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10) * 1.0001).all()


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_numbers_are_widened_without_rounding(name):
    """In every dtype that products may have; they are what the bits stand for."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        kind = dataclasses.replace(one_head(name), dtype=dtype)
        parts, values, scale, offset = coded(kind)
        np.testing.assert_array_equal(scale[:, None], scale_of(kind, parts))
        found = values * scale[..., None] + offset[..., None]
        np.testing.assert_array_equal(found[:, None], decode(kind, parts))


# ---------------------------------------------------------------------------------------
# bits


def tokens_of(length, seed=0):
    """Keys and values f32[layers, length, heads, head_dim]."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((len(FORMATS), length, HEADS, HEAD_DIM)).astype(np.float32) for _ in "kv"]


@functools.cache
def writes(is_packed):
    """A step that stores new tokens in all layers, k `[layers, ...]`."""

    def run(cache, k, v, num_new, text):
        width = dict(num_tokens=k.shape[1]) if is_packed else dict(max_new=k.shape[2])
        cache, step = kv.extend(cache, num_new, tokens=text, **width)
        for layer in range(len(k)):
            cache = kv.write(cache, layer, k[layer], v[layer], step)
        return cache, step.status

    return jax.jit(run)


def write(cache, row, start, k, v, is_packed):
    """Stores `k` and `v` in `row`, beside a token of noise in row 3 if it is active."""
    num_new = np.where(np.asarray(cache.is_active), 1, 0) * (np.arange(4) == 3)
    num_new[row] = k.shape[1]
    noise = tokens_of(1, seed=start + 1)
    if is_packed:
        order = [x for r, x in ((row, 0), (3, 1)) if num_new[r]]
        rows = [[k, v], noise]
        arrays = [np.concatenate([rows[i][half] for i in order], axis=1) for half in (0, 1)]
        arrays = [np.pad(x, [(0, 0), (0, LENGTH - x.shape[1]), (0, 0), (0, 0)]) for x in arrays]
        text = np.zeros(LENGTH, np.int32)
        text[: k.shape[1]] = np.arange(start, start + k.shape[1])
    else:
        arrays = [np.full((len(k), 4, LENGTH, HEADS, HEAD_DIM), np.nan, np.float32) for _ in "kv"]
        for half, new in enumerate((k, v)):
            arrays[half][:, row, : k.shape[1]], arrays[half][:, 3, :1] = new, noise[half]
        text = np.zeros((4, LENGTH), np.int32)
        text[row, : k.shape[1]] = np.arange(start, start + k.shape[1])
    cache, status = writes(is_packed)(cache, *arrays, num_new.astype(np.int32), text)
    assert set(statuses(status)) == {kv.Status.OK}
    return cache


def permuted(cache):
    """The empty cache after rows that came and went: its free blocks are in no order."""
    for rows, lengths in (([0, 1], [13, 5]), ([2, 3], [9, 1])):
        cache, _ = kv.allocate(cache, rows, lengths, tokens=np.zeros((2, LENGTH), np.int32))
    for row in (1, 3, 0, 2):
        cache, _ = kv.free(cache, [row])
    return cache


def written(row, cuts, block_size=4, is_packed=False, is_busy=False):
    """A cache whose `row` holds `tokens_of(LENGTH)`, written in pieces that end at `cuts`."""
    cache = permuted(kv.init(config_of(FORMATS, block_size, enable_prefix_caching=True)))
    rows, lengths = [row, 3 if is_busy else 4], [LENGTH, 9]  # there is no row 4
    text = np.zeros((2, LENGTH), np.int32)
    text[0] = np.arange(LENGTH)
    cache, _ = kv.allocate(testing.poison(cache), rows, lengths, tokens=text)
    k, v = tokens_of(LENGTH)
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        cache = write(cache, row, start, k[:, start:end], v[:, start:end], is_packed)
    return cache


@functools.cache
def at_once():
    return written(0, [])


def assert_equal_slots(found, row, length=LENGTH):
    for layer in range(len(FORMATS)):
        want = Stored(at_once(), 0, layer).arrays
        got = Stored(found, row, layer).arrays
        for name in want:
            assert want[name].dtype == got[name].dtype and len(got[name]) >= length
            assert want[name][:length].tobytes() == got[name][:length].tobytes(), (layer, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "cuts", "options"),
    [
        (2, [5, 6, 11], dict(is_busy=True)),
        (1, [5, 10], dict(is_busy=True, is_packed=True, block_size=8)),
    ],
    ids=["padded pieces", "packed pieces in other blocks"],
)
def test_equal_vectors_are_stored_as_equal_bits(row, cuts, options):
    assert_equal_slots(written(row, cuts, **options), row)


@pytest.mark.slow
def test_a_hit_is_what_recomputation_would_write():
    cache, _ = kv.commit(written(1, [5, 10]))
    text = np.stack([np.arange(LENGTH, dtype=np.int32)] * 2)
    cache, admission = kv.allocate(cache, [2, 4], [LENGTH] * 2, tokens=text)
    assert admission.num_cached.tolist() == [12, 0]
    assert_equal_slots(cache, 2, length=12)
    k, v = (x[:, 12:] for x in tokens_of(LENGTH))
    cache = write(cache, 2, 12, k, v, is_packed=False)
    assert_equal_slots(cache, 2)


# ---------------------------------------------------------------------------------------
# attention


@functools.cache
def step_of(is_packed, options):
    """One model step, `extend` and the attention of every layer."""

    def run(cache, q, k, v, num_new, sink_logits):
        width = dict(num_tokens=q.shape[0]) if is_packed else dict(max_new=q.shape[1])
        cache, step = kv.extend(cache, num_new, **width)
        outputs = []
        for layer in range(cache.config.num_layers):
            cache, out = kv.attention(cache, layer, q, k, v, step, sink_logits=sink_logits, **dict(options))
            outputs.append(out)
        return cache, jnp.stack(outputs), step.status

    return jax.jit(run)


def batch(rng, per_row, is_packed):
    """q, k, v and num_new of a step; `per_row` new tokens of each row. Padding is NaN."""
    num_new = np.zeros(4, np.int32)
    num_new[list(per_row)] = list(per_row.values())
    shape = (8,) if is_packed else (4, 5)
    arrays = []
    for heads in (NUM_Q_HEADS, HEADS, HEADS):
        array = np.full((*shape, heads, HEAD_DIM), np.nan, np.float32)
        for row in per_row:
            at = place(num_new, row, is_packed)
            array[at] = rng.standard_normal(array[at].shape)
        arrays.append(array)
    return (*arrays, num_new)


def place(num_new, row, is_packed):
    if is_packed:
        start = int(num_new[:row].sum())
        return slice(start, start + num_new[row])
    return row, slice(0, num_new[row])


def expected(cache, row, layer, q, **options):
    """Dense attention in float64 to what the row's slots hold."""
    stored, kind = Stored(cache, row, layer), cache.config.layers[layer]
    turn = HADAMARD if kind.rotate else np.eye(HEAD_DIM)
    span = kind.span
    reach = dict(window=span.window, num_sink_tokens=span.num_sink_tokens)
    out, _ = dense_attention(q @ turn, stored.decoded("k"), stored.decoded("v"), **reach, **options)
    return out @ turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_packed", "options", "layers"),
    [(False, (), LAYERS), (True, (("scale", 0.3), ("soft_cap", 2.5)), [FORMATS[3], LAYERS[5]])],
    ids=["padded", "packed, soft cap, sinks"],
)
def test_attention_is_that_to_the_decoded_values(is_packed, options, layers):
    rng = np.random.default_rng(1)
    cache = fragment(kv.init(config_of(layers, max_query_len=5)))
    cache, _ = kv.allocate(cache, [0, 1, 3], [3, 7, 1])
    sink_logits = np.array([0.5, -1, 2, 0], np.float32) if options else None
    for per_row in ({0: 3, 3: 1}, {1: 5}, {1: 2, 0: 1, 3: 5}, {1: 5, 0: 2}, {1: 4, 3: 3}, {0: 1, 1: 1}):
        q, k, v, num_new = batch(rng, per_row, is_packed)
        cache, out, status = step_of(is_packed, options)(testing.poison(cache), q, k, v, num_new, sink_logits)
        assert set(statuses(status)) == {kv.Status.OK}
        for layer in range(len(layers)):
            for row in per_row:
                at = place(num_new, row, is_packed)
                want = expected(cache, row, layer, q[at], sink_logits=sink_logits, **dict(options))
                found = np.asarray(out[layer])[at]
                np.testing.assert_allclose(found, want, atol=1e-5, err_msg=f"layer {layer}, row {row}")
    assert not np.asarray(out)[:, 2].any() or is_packed  # an idle row's padding


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_not_finite_is_nan_in_its_row_and_head_alone(name, bad):
    rng = np.random.default_rng(2)
    cache, _ = kv.allocate(kv.init(config_of(LAYERS, max_query_len=5)), [0, 1, 2], [5, 6, 2])
    arrays = batch(rng, {0: 4, 1: 5, 2: 2}, is_packed=False)
    spoilt = {"q": arrays[0].copy(), "k": arrays[1].copy(), "v": arrays[2].copy()}
    spoilt[name][1, 2, 1, 3] = bad  # of row 1, its third token, head 1
    run = step_of(False, ())
    clean, want, _ = run(cache, *arrays, None)
    after, found, _ = run(cache, *spoilt.values(), arrays[3], None)
    more = batch(rng, {0: 1, 1: 1, 2: 1}, is_packed=False)
    _, want_next, _ = run(clean, *more, None)
    after, found_next, _ = run(after, *more, None)
    for out, exact, num_new, seen_from in ((found, want, arrays[3], 2), (found_next, want_next, more[3], 0)):
        out, exact = np.array(out), np.array(exact)
        assert np.isnan(out[:, 1, seen_from : num_new[1], 2:]).all()  # query heads 2 and 3 read head 1
        out[:, 1, :, 2:] = exact[:, 1, :, 2:] = 0
        assert_same(out, exact)
    for layer in range(len(LAYERS)):
        decoded = Stored(after, 1, layer).decoded(name)
        is_bad = np.arange(6) == 2
        assert np.isnan(decoded[is_bad, 1]).all()
        assert np.isfinite(decoded[~is_bad]).all() and np.isfinite(decoded[is_bad, 0]).all()


# ---------------------------------------------------------------------------------------
# configs, sentences, programs


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            lambda: kv.Quantised(kv.FullAttention(2, 7), "int4"),
            ValueError,
            "head_dim is 7 with format 'int4', expected an even number, .* take 'int8'",
        ),
        (
            lambda: kv.Quantised(kv.FullAttention(2, 7), "int8", rotate=True),
            ValueError,
            "head_dim is 7 with rotate=True, expected an even number",
        ),
        (lambda: kv.Quantised(FULL, "int3"), ValueError, "format is 'int3', expected one of 'int8', 'fp8', "),
        (lambda: kv.Quantised(FULL, None), ValueError, "format is None, expected one of 'int8'"),
        (lambda: kv.Quantised(FULL, ['int8']), ValueError, r"format is \['int8'\], expected one of 'int8'"),
        (lambda: kv.Quantised(FORMATS[0], "int4"), TypeError, "kind is Quantised.*, expected a layer kind "),
        (lambda: kv.Quantised("int8", FULL), TypeError, "kind is 'int8', expected a layer kind that stores"),
        (
            lambda: kv.Quantised(kv.LatentAttention(5, 3), "int8"),
            TypeError,
            "kind is LatentAttention.*, expected a layer kind that stores keys and values as they are",
        ),
        (lambda: kv.Quantised(FULL, "int8", rotate="yes"), TypeError, "rotate is 'yes', expected"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.slow
def test_weights_and_kernels_are_refused_by_the_kinds_name():
    x = np.ones((4, 1, 2, HEAD_DIM), np.float32)

    def trace(layer, **options):
        cache, step = kv.extend(kv.init(config_of(FORMATS)), [0] * 4, max_new=1)
        return kv.attention(cache, layer, x, x, x, step, **options)

    with pytest.raises(
        ValueError, match=r"weights are given and Quantised\(FullAttention, fp8\) layers take"
    ):
        jax.eval_shape(lambda: trace(1, weights=jnp.ones(3)))
    with kv.testing.interpreted():
        with pytest.raises(
            NotImplementedError, match=r"Quantised\(FullAttention, int4\) layers store .* 'xla'"
        ):
            jax.eval_shape(lambda: trace(2, implementation="mosaic_gpu"))


def test_a_config_is_described_and_comes_back_from_json():
    kinds = [*LAYERS, kv.Quantised(dataclasses.replace(FULL, num_blocks=9, block_size=8), "fp8")]
    config = config_of(kinds, dtype=jnp.bfloat16)
    assert config_from_json(config_to_json(config)) == config
    assert config.groups[-1].num_blocks == 9 and config.groups[-1].block_size == 8
    lines = kv.describe(config).splitlines()
    labels = (
        *(f"Quantised(FullAttention, {name})" for name in ("int8", "fp8", "int4", "int4, rotated")),
        "Quantised(SlidingWindow(5), int8, rotated)",
        "Quantised(SlidingWindow(5, sinks 3), int4)",
        "Quantised(FullAttention, fp8)",
    )
    for line, label in zip(lines, labels, strict=False):
        assert line.startswith(f"{label} x 1")
    # A key or value of a head takes 8 numbers, and a scale: 4 bytes, or 2 and an offset of 4 beside integers.
    vectors = 2 * HEADS * 4
    assert [group.block_bytes for group in config.groups[:3]] == [vectors * n for n in (14, 12, 10)]
