"""Recurrent kinds on a cache: each token's output is that of its whole row, computed in float64.

The rows of one cache come in pieces of their own, among them drafts that are taken back.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.config import config_from_json, config_to_json
from kvcache_jax.testing import poison
from tests.recurrence.exact import exact, off

BLOCK, LENGTH, ROWS, PACKED, WIDE, NARROW = 8, 60, 3, 45, 20, 3
HEADS, KEY_DIM, WIDTH, KERNEL = 4, 6, 5, 4
DRAFTS = 3


class Case(NamedTuple):
    """A kind, the shapes of its inputs and weights by name, and what a row's outputs are."""

    kind: kv.Recurrent
    inputs: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    outputs: Callable[..., np.ndarray]


def silu_of_convolution(x, weights):
    return (y := convolution(x, weights)) / (1 + np.exp(-y))


def convolution(x, weights):
    kernel = len(weights["conv"])
    x = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x])
    terms = (weights["conv"][i] * x[i : len(x) - kernel + 1 + i] for i in range(kernel))
    return sum(terms) + weights.get("bias", 0)


def delta_net(key_heads, new, weights):
    x = silu_of_convolution(new["x"], weights)
    q, k, v = np.split(x, np.cumsum([key_heads * KEY_DIM] * 2), axis=1)
    q, k = (y.reshape(len(x), key_heads, KEY_DIM) for y in (q, k))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    state = np.zeros((HEADS, WIDTH, KEY_DIM))
    return exact(state, q / KEY_DIM**0.5, k, v.reshape(-1, HEADS, WIDTH), new["g"], new["beta"])[0]


def mamba2(new, weights):
    x = silu_of_convolution(new["x"], weights)
    x, b, c = np.split(x, np.cumsum([HEADS * WIDTH, 2 * KEY_DIM]), axis=1)
    x, (b, c) = x.reshape(-1, HEADS, WIDTH), (y.reshape(-1, 2, KEY_DIM) for y in (b, c))
    added, state = new["dt"][..., None] * x, np.zeros((HEADS, WIDTH, KEY_DIM))
    return exact(state, c, b, added, new["dt"] * weights["A"], None)[0] + weights["D"][:, None] * x


def short_convolution(new, weights):
    return convolution(new["x"], weights)


def rg_lru(new, weights):
    state, states = 0.0, []
    for x, log_a in zip(new["x"], new["log_a"], strict=True):
        state = np.exp(log_a) * state + np.sqrt(1 - np.exp(2 * log_a)) * x
        states.append(state)
    return np.array(states)


def delta_case(key_heads=HEADS, decay="head", **options):
    channels = 2 * key_heads * KEY_DIM + HEADS * WIDTH
    kind = kv.GatedDeltaNet(
        HEADS, WIDTH, key_dim=KEY_DIM, num_key_heads=key_heads, decay=decay, max_rollback=DRAFTS, **options
    )
    g = (HEADS, KEY_DIM) if decay == "channel" else (HEADS,)
    inputs = {"x": (channels,), "g": g, "beta": (HEADS,)}
    return Case(kind, inputs, {"conv": (KERNEL, channels)}, functools.partial(delta_net, key_heads))


CHANNELS = HEADS * WIDTH + 4 * KEY_DIM
CASES = {
    "gated-delta": delta_case(2),
    "kimi-delta": delta_case(decay="channel"),
    "mamba-2": Case(
        kv.Mamba2(HEADS, WIDTH, state_dim=KEY_DIM, num_groups=2, max_rollback=DRAFTS),
        {"x": (CHANNELS,), "dt": (HEADS,)},
        {"conv": (KERNEL, CHANNELS), "bias": (CHANNELS,), "A": (HEADS,), "D": (HEADS,)},
        mamba2,
    ),
    "convolution": Case(
        kv.ShortConvolution(WIDTH, kernel=3, max_rollback=DRAFTS),
        {"x": (WIDTH,)},
        {"conv": (3, WIDTH), "bias": (WIDTH,)},
        short_convolution,
    ),
    "rg-lru": Case(kv.RGLRU(WIDTH, max_rollback=DRAFTS), {"x": (WIDTH,), "log_a": (WIDTH,)}, {}, rg_lru),
    "bfloat16": delta_case(2, dtype="bfloat16"),
}


def draw(shapes, *leading, seed=0):
    rng, drawn = np.random.default_rng(seed), {}
    ranges = {
        "g": lambda x: -np.exp(1.5 * x - 2.5),
        "log_a": lambda x: -np.exp(1.5 * x - 2.5),
        "beta": lambda x: 1 / (1 + np.exp(-x)),
        "dt": lambda x: np.exp(x - 3),
        "A": lambda x: -np.exp(x + 1),
    }
    for name, shape in shapes.items():
        x = rng.normal(size=(*leading, *shape))
        drawn[name] = ranges.get(name, lambda x: x)(x).astype(np.float32)
    return drawn


INPUTS = {name: draw(case.inputs, ROWS, LENGTH, seed=i) for i, (name, case) in enumerate(CASES.items())}
WEIGHTS = {name: draw(case.weights, seed=20 + i) or None for i, (name, case) in enumerate(CASES.items())}


def config_of(names):
    layers = [kv.FullAttention(1, 1), *(CASES[name].kind for name in names)]
    sizes = dict(num_blocks=ROWS * LENGTH // BLOCK + ROWS, block_size=BLOCK, max_seq_len=LENGTH)
    return kv.CacheConfig(layers, max_seqs=ROWS, max_query_len=WIDE, **sizes)


@functools.partial(jax.jit, static_argnames="width", donate_argnums=0)
def run(cache, num_new, new, width):
    """Computes the next tokens of each row, padded to the width, or packed where there is none."""
    tokens = {"num_tokens": PACKED} if width is None else {"max_new": width}
    cache, step = kv.extend(cache, num_new, **tokens)
    cache, outs = poison(cache), {}
    for name in new:
        layer = 1 + [*CASES].index(name)
        cache, outs[name] = kv.recurrence(cache, layer, new[name], step, weights=WEIGHTS[name])
    return cache, step.status, outs


def padded(pieces, width):
    """Pieces of rows as a step of the width takes them, NaN where there is no token."""
    if width is None:
        pieces, width = [np.concatenate(pieces)], PACKED
    ends = [np.full((width - len(piece), *piece.shape[1:]), np.nan, np.float32) for piece in pieces]
    return np.stack([np.concatenate(both) for both in zip(pieces, ends, strict=True)])


# Tokens of each row; with drafts, which are taken back at once.
STEPS = [
    ([20, 7, 0], False), ([1, 0, 1], False), ([3, 3, 3], True), ([1, 1, 1], False), ([0, 13, 20], False),
    ([2, 3, 1], True), ([3, 1, 2], False), ([1, 1, 1], False), ([2, 1, 3], True), ([1, 3, 1], False),
    ([13, 20, 7], False), ([1, 1, 0], False), ([3, 0, 3], True), ([3, 2, 1], False), ([1, 1, 3], False),
    ([7, 2, 9], False),
]  # fmt: skip


@pytest.mark.quick_cases("padded")
@pytest.mark.parametrize(
    ("names", "widths"),
    [([*CASES][:-1], [WIDE]), ([*CASES][:-1], [NARROW, WIDE]), ([*CASES], [])],
    ids=["padded", "two widths", "packed"],
)
def test_rows_in_pieces_give_the_recurrence(names, widths):
    """In steps of the least of the widths that holds all pieces, or packed."""
    cache, lengths = kv.init(config_of(names)), np.zeros(ROWS, int)
    cache, _ = kv.allocate(cache, range(ROWS), [0] * ROWS)
    found = {name: [[] for _ in range(ROWS)] for name in names}
    for num_new, is_draft in STEPS:
        starts, ends = lengths, lengths + num_new
        width = min((width for width in widths if width >= max(num_new)), default=None)

        def piece(x, ends=ends, width=width, starts=starts, scale=0.5 if is_draft else 1):
            rows = [scale * x[row, starts[row] : ends[row]] for row in range(ROWS)]
            new = padded(rows, width)
            return new[0] if width is None else new

        new = jax.tree.map(piece, {name: INPUTS[name] for name in names})
        cache, status, outs = run(cache, np.int32(num_new), new, width)
        assert not np.any(status[np.array(num_new) > 0])
        if is_draft:
            cache, status = kv.truncate(cache, range(ROWS), lengths)
            assert not np.any(status)
            continue
        lengths = ends
        for name, out in jax.device_get(outs).items():
            firsts = np.cumsum(num_new) - num_new
            for row, (first, num) in enumerate(zip(firsts, num_new, strict=True)):
                found[name][row].append(out[row, :num] if width else out[first : first + num])
    assert kv.check_invariants(cache) == [] and lengths.min() > 5 * BLOCK
    for name in names:
        errors = []
        for row in range(ROWS):
            new = {key: x[row, : lengths[row]].astype(np.float64) for key, x in INPUTS[name].items()}
            expected = CASES[name].outputs(new, WEIGHTS[name] or {})
            errors.append(off(np.concatenate(found[name][row]), expected))
        least, most = (1e-4, 0.1) if name == "bfloat16" else (0, 1e-5)
        assert least < max(errors) < most, name


def start_of_row(kind, num_entries):
    """What `advance` reads where a row begins."""
    point = {name: jnp.zeros(array.shape, array.dtype) for name, array in kind.point(jnp.float32).items()}
    entry = kind.entry(num_entries, jnp.float32)
    return point, {name: jnp.zeros(array.shape, array.dtype) for name, array in entry.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES][:-1])
def test_gradients_pass_through_a_kind_with_padding(name):
    kind = CASES[name].kind
    point, held = start_of_row(kind, BLOCK if kind.has_points else kind.reach)
    new = jax.tree.map(
        lambda x: np.where(np.arange(5).reshape(5, *[1] * (x.ndim - 2)) < 3, x[0, :5], 0), INPUTS[name]
    )

    def total(point, held, new, weights):
        out, entries = kind.advance(point, held, jnp.int32(0), new, weights)
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves((out[:3], entries)))

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(point, held, new, WEIGHTS[name])
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))
    assert all(np.any(grad) for grad in jax.tree.leaves(grads[2]))


@pytest.mark.parametrize("name", ["rg-lru", "mamba-2"])
def test_gradients_through_a_cache_are_refused(name):
    """Also where loops fold what is stored."""
    cache, new = kv.init(config_of([name])), jax.tree.map(lambda x: x[:, :3], INPUTS[name])

    def total(new, pools):
        held = dataclasses.replace(cache, pools=pools)
        held, step = kv.extend(held, [3] * ROWS, max_new=3)
        held, out = kv.recurrence(held, 1, new, step, weights=WEIGHTS[name])
        return out.sum() + sum(x.sum() for x in jax.tree.leaves(held.pools))

    says = "^got a gradient through (RGLRU recent|Mamba2 .*) layers, which have none"
    for argnum in (0, 1):
        refused = None
        try:
            jax.eval_shape(jax.grad(total, argnum), new, cache.pools)
        except (NotImplementedError, ValueError) as error:
            refused = str(error)
        assert refused is not None and re.match(says, refused), refused


def test_kinds_are_exported_by_their_fields():
    config = config_of(CASES)
    assert config_from_json(config_to_json(config)) == config
    assert [CASES[name].kind.has_points for name in CASES] == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kv.GatedDeltaNet(4, 8, key_dim=0), "key_dim is 0, expected at least 1"),
        (lambda: kv.GatedDeltaNet(4, 8, key_dim=8, num_key_heads=3), "num_key_heads is 3, expected a"),
        (lambda: kv.GatedDeltaNet(4, 8, key_dim=8, kernel=1), "kernel is 1, expected at least 2"),
        (lambda: kv.GatedDeltaNet(4, 8, key_dim=8, decay="row"), "decay is 'row', expected 'head' or"),
        (lambda: kv.GatedDeltaNet(4, 8, key_dim=8, max_rollback=-1), "max_rollback is -1, expected at"),
        (lambda: kv.Mamba2(4, 8, state_dim=8, num_groups=3), "num_groups is 3, expected a divisor of"),
        (lambda: kv.Mamba2(4, 8, state_dim=8, kernel=0), "kernel is 0, expected at least 2"),
        (lambda: kv.ShortConvolution(0, kernel=3), "num_channels is 0, expected at least 1"),
        (lambda: kv.ShortConvolution(4, kernel=1), "kernel is 1, expected at least 2"),
        (lambda: kv.RGLRU(0), "width is 0, expected at least 1"),
    ],
)  # fmt: skip
def test_fields_without_a_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "new", "weights", "message"),
    [
        ("gated-delta", {"beta": None}, {}, r"new inputs of GatedDeltaNet per .* expected .*'beta': \(4,\)"),
        ("kimi-delta", {"g": (HEADS,)}, {}, r"'g': \(4,\).* expected .*'g': \(4, 6\)"),
        ("mamba-2", {"z": (3,)}, {}, r"'z': \(3,\).*, expected \{'x': \(44,\), 'dt': \(4,\)\}"),
        ("mamba-2", {}, {"D": None}, r"weights of Mamba2 are .*'D': \(4,\).*; 'bias' may be left out"),
        ("mamba-2", {}, {"bias": (1,)}, r"'bias': \(1,\).*, expected .*'bias': \(44,\)"),
        ("convolution", {}, {"conv": (4, WIDTH)}, r"'conv': \(4, 5\).*, expected \{'conv': \(3, 5\)"),
        ("convolution", {}, None, "weights of ShortConvolution are None, expected"),
        ("rg-lru", {"log_a": (2,)}, {}, r"'log_a': \(2,\).*, expected .*'log_a': \(5,\)"),
        ("rg-lru", {}, {"conv": (4,)}, "weights are given and RGLRU layers take none, expected weights=None"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(name, new, weights, message):
    """Each differs from what fits in one array: another shape, or None for one that is missing."""
    case = CASES[name]

    def changed(shapes, changes, *leading):
        shapes = {key: shape for key, shape in (shapes | changes).items() if shape is not None}
        return {key: np.ones((*leading, *shape), np.float32) for key, shape in shapes.items()}

    new = changed(case.inputs, new, 2)
    weights = None if weights is None else changed(case.weights, weights) or None
    with pytest.raises(ValueError, match=message):
        case.kind.advance(*start_of_row(case.kind, BLOCK), jnp.int32(0), new, weights)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
@pytest.mark.parametrize("name", ["mamba-2", "rg-lru"])
def test_inputs_and_weights_that_are_no_floats_are_refused(name, dtype):
    """Outputs would be whole numbers, or lack what is imaginary."""
    case = CASES[name]
    new = {key: np.ones((2, *shape), np.float32) for key, shape in case.inputs.items()}
    weights = {key: np.ones(shape, np.float32) for key, shape in case.weights.items()}
    found = f"{dtype.__name__}.*, expected floats"

    def advance(new, weights):
        case.kind.advance(*start_of_row(case.kind, BLOCK), jnp.int32(0), new, weights or None)

    with pytest.raises(TypeError, match=f"new inputs of .* per token are .*'x': '{found}"):
        advance(new | {"x": new["x"].astype(dtype)}, weights)
    if weights:
        with pytest.raises(TypeError, match=f"weights of Mamba2 are .*'A': '{found}"):
            advance(new, weights | {"A": weights["A"].astype(dtype)})
        with pytest.raises(ValueError, match=r"weights of Mamba2 are .*'A': \(\), .*expected"):
            advance(new, weights | {"A": [[1.0]]})


PIECES = 9, 3, 3, 3, 2, 11, 3
"""Tokens by which every row goes on in each step."""


def run_rows(texts, forks_at=None, ends_anew=False):
    """Feeds each row its text; returns the outputs `[ROWS, tokens, ...]` by kind.

    Args:
      texts: By row, a row of `INPUTS` and the factor of its inputs.
      forks_at: Step before which row 1 becomes a fork of row 0.
      ends_anew: Whether another text was fed, freed and its row started again, before.
    """
    names, outs = [*CASES][:-1], []
    cache, _ = kv.allocate(kv.init(config_of(names)), range(ROWS), [0] * ROWS)
    if ends_anew:
        cache, _ = feed_rows(cache, names, [(0, np.nan)] * ROWS, 0, 11)
        cache, _ = kv.free(cache, range(ROWS))
        cache, _ = kv.allocate(cache, range(ROWS), [0] * ROWS)
    for nth, (num, end) in enumerate(zip(PIECES, np.cumsum(PIECES), strict=True)):
        if nth == forks_at:
            cache, _ = kv.free(cache, [1])
            cache, _ = kv.fork(cache, [0], [1])
        cache, out = feed_rows(cache, names, texts, end - num, num)
        outs.append(out)
    return {name: np.concatenate([out[name] for out in outs], axis=1) for name in names}


def feed_rows(cache, names, texts, start, num):
    def piece(x):
        rows = [scale * x[row, start : start + num] for row, scale in texts]
        return padded(rows, WIDE).astype(np.float32)

    new = jax.tree.map(piece, {name: INPUTS[name] for name in names})
    cache, status, outs = run(cache, np.full(ROWS, num, np.int32), new, WIDE)
    assert not np.any(status)
    return cache, {name: np.asarray(out)[:, :num] for name, out in outs.items()}


def test_states_that_are_no_numbers_stay_in_their_row():
    """Also where another row gets the blocks that they were in."""
    clean = run_rows([(0, 1), (1, 1), (2, 1)])
    spoilt = run_rows([(0, 1), (1, np.nan), (2, 1)])
    again = run_rows([(0, 1), (1, 1), (2, 1)], ends_anew=True)
    for name, out in clean.items():
        assert np.isfinite(out).all() and np.isnan(spoilt[name][1]).all(), name
        np.testing.assert_array_equal(spoilt[name][[0, 2]], out[[0, 2]], name)
        np.testing.assert_array_equal(again[name], out, name)


@pytest.mark.parametrize("forks_at", [2, 5])
def test_a_fork_goes_its_own_way_as_a_row_of_its_own_would(forks_at, monkeypatch):
    """Within a block, after which the rows' inputs differ; equal to the bit."""
    at = sum(PIECES[:forks_at])
    for name in [*CASES][:-1]:
        inputs = {key: x.copy() for key, x in INPUTS[name].items()}
        for x in inputs.values():
            x[1, :at] = x[0, :at]
        monkeypatch.setitem(INPUTS, name, inputs)
    rows = [(0, 1), (1, 1), (2, 1)]
    alone, forked = run_rows(rows), run_rows(rows, forks_at)
    for name, out in alone.items():
        np.testing.assert_array_equal(forked[name], out, name)
        assert (out[0, at:] != out[1, at:]).any(), name
