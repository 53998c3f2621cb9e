"""Filters and drafts against slow oracles; draws against the distributions they claim, by chi-square."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache_jax as kv
from kvcache_jax.decoding import speculation
from kvcache_jax.decoding.sampling import filtered_logprobs, row_keys, sample, sampling_columns
from kvcache_jax.decoding.speculation import accept_drafts, ngram_drafts
from tests.support.helpers import says

SEEDS, NUM_DRAWS, VOCAB, MAX_DRAFTS = (0, 1), 60_000, 16, 3
ROWS = np.arange(NUM_DRAWS)
NUM_FILTERED = 160
PUBLIC = (filtered_logprobs, row_keys, sample, accept_drafts, ngram_drafts)

# Keys that a draft may be drawn with, beside the row's own; and those that it may not.
FOLDED = jax.vmap(lambda key: jax.random.fold_in(key, 1))
SPLIT = jax.vmap(lambda key: jax.random.split(key)[0])
VERIFYING = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, speculation._VERIFICATION))[1])


def softmax(logits):
    weights = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def model(seed, num_possible):
    """f64[VOCAB, VOCAB], the next token's distribution after each token."""
    logits = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
    return softmax(np.where(logits < np.sort(logits, axis=1)[:, [-num_possible]], -np.inf, logits))


# The target and a draft model: each has tokens that the other never draws. Or drafts that are looked up.
P, Q = model(1, num_possible=11), model(2, num_possible=13)
LOOKED_UP = np.argsort(P, axis=1)[:, -2].astype(np.int32)
Q_LOOKED_UP = np.eye(VOCAB)[LOOKED_UP]
with np.errstate(divide="ignore"):
    LOG_P, LOG_Q = np.log(P).astype(np.float32), np.log(Q).astype(np.float32)


def chi_square(tokens, probabilities):
    """The p-value of draws from a distribution; cells that expect fewer than 5 are pooled."""
    expected = probabilities.ravel() * len(tokens)
    observed = np.bincount(tokens, minlength=expected.size)
    if observed[expected == 0].any():
        return 0.0
    is_small = expected < 5
    expected = np.append(expected[~is_small], expected[is_small].sum())
    observed = np.append(observed[~is_small], observed[is_small].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(jax.scipy.special.gammaincc((expected.size - 1) / 2, statistic / 2))


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """(probabilities, how near any filter came to deciding otherwise), token by token in float64."""
    temperature, top_p, min_p = float(temperature), float(top_p), float(min_p)
    logits = [-np.inf if np.isnan(x) else min(float(x), float(np.finfo(np.float32).max)) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    probabilities = np.zeros(len(logits))
    if temperature == 0 or logits[ranked[0]] == -np.inf:
        probabilities[ranked[0]] = 1
        return probabilities, 1.0
    weights = {token: np.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked}
    kept = ranked[:top_k] if top_k else ranked
    margin = min([1.0, *(abs(weights[token] - min_p) for token in kept if 0 < min_p < 1)])
    kept = [token for token in kept if weights[token] >= min_p]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token]
        if top_p < 1:
            margin = min(margin, abs(mass - top_p * total) / total)
            if mass >= top_p * total:
                break
    for token in nucleus:
        probabilities[token] = weights[token] / mass
    return probabilities, margin


def padded(logits, num_rows, vocab):
    """Logits of more rows and tokens, which are never drawn: calls of one shape share a program."""
    num_more = num_rows - len(logits), vocab - logits.shape[1]
    return np.pad(logits, [(0, num_more[0]), (0, num_more[1])], constant_values=-np.inf)


@pytest.mark.parametrize("vocab", [1, 7, 50])
@pytest.mark.parametrize("kind", ["ties", "normal", "extreme"])
def test_filters_match_oracle(vocab, kind):
    rng = np.random.default_rng([vocab, len(kind)])
    n = NUM_FILTERED
    logits = {
        "ties": rng.integers(-3, 3, (n, vocab)) / 2,
        "normal": rng.normal(scale=3, size=(n, vocab)),
        "extreme": rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e30, -90, -0.0, 0, 1], (n, vocab)),
    }[kind].astype(np.float32)
    options = {
        "temperature": rng.choice(np.float32([0, 1e-30, 0.5, 1, 1, 2, 100]), n),
        "top_k": rng.choice([0, 0, 1, 2, 5, 49, 1000], n),
        "top_p": rng.choice(np.float32([1, 1, 0.95, 0.77, 0.31, 1e-6]), n),
        "min_p": rng.choice(np.float32([0, 0, 0.013, 0.23, 1]), n),
    }
    logprobs = np.asarray(filtered_logprobs(logits, sampling_columns(n, **options)))
    num_compared = 0
    for row, found in enumerate(logprobs):
        expected, margin = oracle(logits[row], **{name: column[row] for name, column in options.items()})
        if margin > 1e-5:  # else rounding may decide
            num_compared += 1
            np.testing.assert_allclose(np.exp(found), expected, rtol=1e-4, atol=1e-7)
            np.testing.assert_array_equal(found > -80, expected > np.exp(-80))
    assert num_compared > 0.7 * n


def test_filters_at_their_boundaries():
    def kept(logits, **options):
        logits = padded(np.float32([logits]), NUM_FILTERED, 50)
        logprobs = filtered_logprobs(logits, sampling_columns(NUM_FILTERED, temperature=1.0, **options))
        return np.flatnonzero(np.asarray(logprobs[0]) > -np.inf).tolist()

    assert kept([2, 2, 2, 2, 2, 1], top_k=3) == [0, 1, 2]
    assert kept([1, 2, 0, 2, 1, 1], top_k=4) == [0, 1, 3, 4]
    assert kept([0] * 8, top_p=0.25) == [0, 1]
    assert kept([0] * 10, top_p=0.3) == [0, 1, 2]
    # Top-p sees what top-k and min-p left, renormalised: 0.4 of 1 is less than 0.56, 0.4 of 0.7 is not.
    weights = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(weights, top_p=0.56) == [0, 1]
    assert kept(weights, top_p=0.56, top_k=2) == kept(weights, top_p=0.56, min_p=0.7) == [0]
    # Where nothing cuts, the tail stays, however small it is.
    assert kept([0] + [-20] * 40, top_p=1.0, top_k=1000) == list(range(41))


def test_greedy_is_the_first_argmax_alone_and_among_others():
    logits = np.random.default_rng(0).integers(-2, 3, (40, 9)).astype(np.float32)
    position, expected = np.arange(40), logits.argmax(axis=1)
    greedy, logprob = jax.device_get(sample(logits, sampling_columns(40), position))
    np.testing.assert_array_equal(greedy, expected)
    np.testing.assert_allclose(logprob, np.log(softmax(logits))[position, expected], rtol=1e-5)
    mixed = sampling_columns(40, temperature=[0.0, 5.0] * 20, top_p=0.9)
    is_expected = np.asarray(sample(logits, mixed, position)[0]) == expected
    assert is_expected[::2].all() and not is_expected[1::2].all()


def test_logits_that_are_no_numbers_show_in_the_logprob():
    logits = [[np.nan] * 3, [1, np.nan, 2], [-np.inf] * 3, [0, np.inf, 0], [0, -np.inf, 1]]
    logits = padded(np.float32(logits), 40, 9)
    logits[0] = np.nan
    for temperature in (0.0, 1.0):
        params = sampling_columns(40, temperature=temperature, top_p=0.9)
        token, logprob = jax.device_get(sample(logits, params, np.arange(40)))
        assert token[0] == 0 and token[1] != 1 and token[2] == 0 and token[3] == 1 and token[4] != 1
        assert np.isnan(logprob[:5]).tolist() == [True, True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.1}]
)
def test_draws_follow_the_filtered_distribution(options):
    options = {"temperature": 1.0} | options
    expected = oracle(LOG_P[3], **options)[0]
    logits = jnp.broadcast_to(LOG_P[3], (NUM_DRAWS, VOCAB))
    for seed in SEEDS:
        params = sampling_columns(NUM_DRAWS, seed=seed, **options)
        tokens, logprob = sample(logits, params, jnp.full(NUM_DRAWS, 7))
        assert chi_square(tokens, expected) > 1e-3
        assert chi_square(tokens, oracle(LOG_P[3], **options | {"temperature": 0.9})[0]) < 1e-6
        np.testing.assert_allclose(logprob, LOG_P[3][tokens], rtol=1e-4)
    # One row at successive positions is as random as rows of different seeds.
    row = jax.tree.map(lambda column: jnp.repeat(column[:1], NUM_DRAWS), params)
    assert chi_square(sample(logits, row, ROWS)[0], expected) > 1e-3


@pytest.mark.slow
def test_a_draw_depends_on_its_row_alone():
    rng = np.random.default_rng(4)
    logits, position = rng.normal(size=(12, 30)).astype(np.float32), rng.integers(0, 1000, 12)
    top_k = [0, *rng.integers(0, 30, 11)]
    params = sampling_columns(12, temperature=2.0, top_k=top_k, top_p=0.99, seed=3)
    columns, whole = jax.device_get((params, sample(logits, params, position)))

    def part(rows, position):
        own = jax.tree.map(lambda column: column[rows], columns)
        return jax.device_get(sample(logits[rows], own, np.asarray(position)))

    for rows in ([7], [11, 0, 5, 3], list(range(11, -1, -1)), [4, 4, 4, 4]):
        token, logprob = part(rows, position[rows])
        np.testing.assert_array_equal(token, whole[0][rows])
        np.testing.assert_allclose(logprob, whole[1][rows], rtol=1e-6)
    assert len({int(part([0], [place])[0][0]) for place in range(30)}) > 5
    # Nor does it depend on the generator that the user's program prefers (of a shape not compiled before).
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(part(list(range(11)), position[:11])[0], whole[0][:11])
        np.testing.assert_array_equal(sampling_columns(12, seed=3).seed, params.seed)


def test_seeds_of_rows():
    np.testing.assert_array_equal(sampling_columns(3, seed=9).seed, sampling_columns(100, seed=9).seed[:3])
    near = np.concatenate([sampling_columns(100, seed=seed).seed for seed in range(20)])
    assert len(set(near.tolist())) == 2000
    assert sampling_columns(2, seed=[4, 2**32 - 1]).seed.tolist() == [4, 2**32 - 1]


@functools.partial(jax.jit, static_argnames="num_tokens")
def keys_from(params, position, num_tokens):
    """keys[n, num_tokens], of the position and those after it."""
    return jnp.stack([row_keys(params, position + i) for i in range(num_tokens)], axis=1)


@functools.partial(jax.jit, static_argnames="draft_keys")
def speculate(params, last, position, num_drafts, draft_keys):
    """(num_accepted i32[n], emitted i32[n, D + 1]) of a round; without `draft_keys` drafts are looked up."""
    drafts, context = [], last
    for ahead in range(MAX_DRAFTS):
        if draft_keys is None:
            context = jnp.asarray(LOOKED_UP)[context]
        else:
            keys = draft_keys(row_keys(params, position + ahead))
            context = jax.vmap(jax.random.categorical)(keys, jnp.asarray(LOG_Q)[context]).astype(jnp.int32)
        drafts.append(context)
    drafts = jnp.stack(drafts, axis=1)
    contexts = jnp.concatenate([last[:, None], drafts], axis=1)
    target, draft = jnp.asarray(LOG_P)[contexts], draft_keys and jnp.asarray(LOG_Q)[contexts[:, :-1]]
    keys = keys_from(params, position, MAX_DRAFTS + 1)
    num_accepted, token = accept_drafts(target, drafts, num_drafts, draft, keys)
    emitted = jnp.concatenate([drafts, token[:, None]], axis=1).at[ROWS, num_accepted].set(token)
    return num_accepted, emitted


def first_two_tokens(seed, draft_keys):
    """(num_drafts, num_accepted, the first two tokens as one number) of rows that decode speculatively.

    The second round starts where the first ended: at positions whose drafts were drawn and thrown away.
    """
    params = sampling_columns(NUM_DRAWS, seed=seed)
    num_drafts = np.int32(ROWS % (MAX_DRAFTS + 1))
    last, position = np.zeros(NUM_DRAWS, np.int32), np.full(NUM_DRAWS, 5, np.int32)
    accepted, emitted = jax.device_get(speculate(params, last, position, num_drafts, draft_keys))
    last, position = emitted[ROWS, accepted], position + accepted + 1
    _, later = jax.device_get(speculate(params, last, position, num_drafts, draft_keys))
    second = np.where(accepted > 0, emitted[:, 1], later[:, 0])
    return num_drafts, accepted, emitted[:, 0] * VOCAB + second


@pytest.mark.slow
@pytest.mark.parametrize("draft_keys", [lambda keys: keys, FOLDED, SPLIT, None])
def test_speculation_emits_what_the_target_would(draft_keys):
    for seed in (3,) if draft_keys in (FOLDED, SPLIT) else SEEDS:
        num_drafts, num_accepted, pairs = first_two_tokens(seed, draft_keys)
        assert chi_square(pairs, P[0][:, None] * P) > 1e-3
        # The chance that all drafts so far are accepted, by last token; for the first, sum(min(p, q)).
        reached = np.eye(VOCAB)[0]
        for place in range(MAX_DRAFTS):
            reached = reached @ np.minimum(P, Q_LOOKED_UP if draft_keys is None else Q)
            chance, rows = reached.sum(), num_accepted[num_drafts > place]
            assert abs((rows > place).mean() - chance) < 4 * np.sqrt(chance * (1 - chance) / len(rows))
        assert (num_accepted <= num_drafts).all()


def last_token_model(logits, tokens, cache, step):
    """The next token's logits by the last one, of `logits` f32[VOCAB, VOCAB]; nothing is kept."""
    return jnp.asarray(logits)[tokens], cache


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_generate_draws_what_the_filtered_target_would(seed):
    """With drafts of another model, drawn through the same filters: each token, given the one before it."""
    num_rows, num_new, filters = 64, 270, dict(temperature=0.8, top_k=9, top_p=0.9)
    sizes = dict(num_blocks=1280, max_seqs=num_rows, max_seq_len=num_new + 8)
    config = kv.CacheConfig([kv.FullAttention(1, 1)], **sizes)
    draft, prompts = kv.Draft(last_token_model, LOG_Q, config), [[row % VOCAB] for row in range(num_rows)]
    options = dict(
        max_new_tokens=num_new,
        drafts=kv.decoding.Drafts(MAX_DRAFTS, draft),
        sampling=kv.decoding.SamplingParams(seed=seed, **filters),
    )
    result = kv.generate(last_token_model, LOG_P, prompts, config, **options)
    assert 0.1 < result.num_accepted / result.num_drafted < 0.9
    expected, observed = np.stack([oracle(row, **filters)[0] for row in LOG_P]), np.zeros((VOCAB, VOCAB))
    for prompt, generation in zip(prompts, result.generations, strict=True):
        assert len(generation.tokens) == num_new
        np.add.at(observed, ([*prompt, *generation.tokens[:-1]], generation.tokens), 1)
    is_possible = expected > 0
    assert not observed[~is_possible].any() and observed.sum() == num_rows * num_new
    expected *= observed.sum(axis=1, keepdims=True)
    is_counted = expected >= 5
    statistic = ((observed - expected)[is_counted] ** 2 / expected[is_counted]).sum()
    freedom = is_counted.sum() - is_possible.any(axis=1).sum()
    assert jax.scipy.special.gammaincc(freedom / 2, statistic / 2) > 1e-3


@pytest.mark.slow
def test_drafts_that_share_the_verifying_bits_are_found():
    _, _, pairs = first_two_tokens(0, VERIFYING)
    assert chi_square(pairs, P[0][:, None] * P) < 1e-6


@pytest.mark.parametrize("q", [Q[0], Q_LOOKED_UP[0]], ids=["random", "looked up"])
@pytest.mark.parametrize("wrong", [None, "every draft accepted", "not subtracted", "not renormalised"])
def test_chi_square_finds_wrong_speculation(wrong, q):
    p = P[0]
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        draft = rng.choice(VOCAB, NUM_DRAWS, p=q)
        is_accepted = (rng.random(NUM_DRAWS) * q[draft] < p[draft]) | (wrong == "every draft accepted")
        residual = p if wrong == "not subtracted" else np.maximum(p - q, 0)
        if wrong != "not renormalised":
            residual = residual / residual.sum()
        drawn = np.searchsorted(np.cumsum(residual), rng.random(NUM_DRAWS), side="right")
        found = chi_square(np.where(is_accepted, draft, np.minimum(drawn, VOCAB - 1)), p)
        assert found > 1e-3 if wrong is None else found < 1e-6


def test_greedy_target_accepts_its_own_tokens_only():
    rng = np.random.default_rng(0)
    n, most = 200, 4
    logits = rng.normal(size=(n, most + 1, VOCAB)).astype(np.float32)
    best = logits.argmax(axis=2)
    with np.errstate(divide="ignore"):
        target = np.log(np.eye(VOCAB, dtype=np.float32)[best])
    np.testing.assert_array_equal(filtered_logprobs(logits[:, 0], sampling_columns(n)), target[:, 0])
    drafts = np.where(rng.random((n, most)) < 0.7, best[:, :-1], rng.integers(0, VOCAB, (n, most)))
    num_drafts = rng.integers(0, most + 1, n)
    is_best = (drafts == best[:, :-1]) & (np.arange(most) < num_drafts[:, None])
    expected = np.cumprod(is_best, axis=1).sum(axis=1)
    for draft in (None, np.log(softmax(logits[:, :-1] / 3)).astype(np.float32)):
        keys = keys_from(sampling_columns(n), np.arange(n), most + 1)
        accepted, token = accept_drafts(target, drafts, num_drafts, draft, keys)
        np.testing.assert_array_equal(accepted, expected)
        np.testing.assert_array_equal(token, best[np.arange(n), expected])


def test_speculation_at_its_edges():
    n = 500
    keys = keys_from(sampling_columns(n, seed=1), np.arange(n, dtype=np.int32), 3)
    target = np.broadcast_to(LOG_P[0], (n, 3, VOCAB))
    likely, rare = np.argsort(P[0])[[-1, -3]]

    def accept(token, num_drafts, draft, target=target):
        drafts, counts = np.full((n, 2), token, np.int32), np.full(n, num_drafts, np.int32)
        return jax.device_get(accept_drafts(target, drafts, counts, draft, keys))

    # A draft model equal to the target is always right; more drafts than there are count as all.
    accepted, token = accept(likely, 9, target[:, :2])
    assert (accepted == 2).all() and len(set(token.tolist())) > 5
    # If rounding leaves nothing of max(p - q, 0), the target is drawn from.
    accepted, token = accept(likely, 2, target[:, :2] + np.float32(0.1))
    assert len(set(token[accepted < 2].tolist())) > 5
    # What is no token is rejected, and the target drawn from as it is.
    for nothing in (-1, VOCAB, 2**31 - 1):
        accepted, token = accept(nothing, 2, None)
        assert (accepted == 0).all() and (P[0][token] > 0).all() and likely in token
    # A rejected draft is not drawn again, and what is past num_drafts is not read.
    unread = np.where(np.arange(3)[:, None] < 2, target, np.float32(np.nan))
    accepted, token = accept(rare, 1, None, target=unread)
    assert set(accepted.tolist()) == {0, 1} and rare in token
    assert rare not in token[accepted == 0]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=5, max_size=5),
    padding=st.integers(0, 2),
    num_drafts=st.sampled_from([1, 4]),
    ngram=st.sampled_from([1, 2, 3]),
)
def test_ngram_drafts_match_oracle(rows, padding, num_drafts, ngram):
    def looked_up(text):
        for size in range(min(ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == text[-size:]:
                    return text[start + size :][:num_drafts]
        return []

    tokens = np.array([text + [padding] * (14 - len(text)) for text in rows], np.int32)
    drafts, count = ngram_drafts(tokens, np.array([len(text) for text in rows]), num_drafts, ngram)
    expected = [looked_up(text) for text in rows]
    assert count.tolist() == [len(found) for found in expected]
    assert drafts.tolist() == [found + [0] * (num_drafts - len(found)) for found in expected]


def everything(logits, params, position):
    filtered, row_keys, sample, accept_drafts, ngram_drafts = PUBLIC
    drafts, count = ngram_drafts(jnp.tile(position[:, None] % 3, 6), jnp.full_like(position, 6), 2)
    target = jnp.stack([filtered(logits, params)] * 3, axis=1)
    keys = jnp.stack([row_keys(params, position + i) for i in range(3)], axis=1)
    verified = [accept_drafts(target, drafts, count, draft, keys) for draft in (None, target[:, 1:])]
    return sample(logits, params, position), drafts, count, target, verified


def example(seed, **options):
    rng = np.random.default_rng(seed)
    options = {"temperature": [0.0, 0.8, 1.2], "top_k": [0, 3, 0], "top_p": 0.9} | options
    logits, position = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32), rng.integers(0, 99, 3)
    return logits, sampling_columns(3, seed=seed, **options), jnp.asarray(position, jnp.int32)


def assert_close(found, expected):
    """Equal dtypes and integers; floats may differ by rounding where operations are fused otherwise."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5 if a.dtype == jnp.float32 else 0, atol=1e-6)


@pytest.mark.slow
def test_transforms_change_nothing():
    several = [example(seed) for seed in range(3)]
    plain = [everything(*arguments) for arguments in several]
    with jax.enable_x64(True):
        assert_close(jax.jit(everything)(*several[0]), plain[0])
    stack = functools.partial(jax.tree.map, lambda *leaves: np.stack(leaves)[None])
    found = jax.jit(lambda arguments: jax.lax.map(lambda each: jax.vmap(everything)(*each), arguments))
    assert_close(found(stack(*several)), stack(*plain))


def test_no_program_is_compiled_twice():
    everything(*example(0))
    programs = [fn._cache_size() for fn in PUBLIC]
    everything(*example(1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.1))
    everything(*example(2, temperature=[1.0, 2.0, 3.0]))
    assert [fn._cache_size() for fn in PUBLIC] == programs


@pytest.mark.parametrize("top_k", [0, 2])
def test_the_highest_temperature_draws_as_the_others_do(top_k):
    hottest = sampling_columns(4000, temperature=8e37, top_k=top_k, seed=1)
    logits = np.float32([[2e38, -np.inf, 3e38, 1e38]]).repeat(4000, axis=0)
    token, _ = sample(logits, hottest, np.zeros(4000, np.int32))
    expected = np.array([np.exp(-10 / 8), 0, 1, np.exp(-20 / 8) * (top_k == 0)])
    np.testing.assert_allclose(np.bincount(token, minlength=4) / 4000, expected / expected.sum(), atol=0.03)


def test_wrong_arguments_are_named():
    params, one = sampling_columns(2), jnp.ones(1, jnp.int32)
    keys, logits = keys_from(params, jnp.arange(2), 4), jnp.zeros((2, 5))
    target, drafts, count = jnp.zeros((2, 4, 5)), jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    accept = functools.partial(accept_drafts, keys=keys)
    for call, *words in [
        (lambda: sampling_columns(2.5), "num_rows", "2.5", "Python int"),
        (lambda: sampling_columns(2, temperature=-0.5), "temperature", "-0.5", "0 to 8e37"),
        (lambda: sampling_columns(2, temperature=9e37), "temperature", "9e+37", "0 to 8e37"),
        (lambda: sampling_columns(2, top_k=[3, -1]), "top_k", "-1", "integers in"),
        (lambda: sampling_columns(2, top_k=2.0), "top_k", "float64", "integers in"),
        (lambda: sampling_columns(2, top_p=[1.0, 1.5]), "top_p", "1.5", "above 0, at most 1"),
        (lambda: sampling_columns(2, min_p=-0.1), "min_p", "-0.1", "0, 1"),
        (lambda: sampling_columns(2, min_p=[0.1, 0.2, 0.3]), "min_p", "3,", "one for all rows", "2,"),
        (lambda: sampling_columns(2, seed=[1, 2**32]), "seed", 2**32, "0, 2**32"),
        (lambda: filtered_logprobs(target[0], params), "logits", "4, 5", "2, vocab"),
        (lambda: sample(drafts, params, count), "logits", "int32", "floating"),
        (lambda: sample(logits, params, one), "position", "1,", "2,", "one per row"),
        (lambda: accept(target, drafts[:, :0], count, None), "draft_tokens", "2, 0", "at least 1"),
        (lambda: accept(target, drafts, count, target), "draft_logprobs", "2, 4, 5", "2, 3, 5"),
        (lambda: accept_drafts(target, drafts, count, None, keys[:1]), "keys", "1,", "2,", "row_keys"),
        (lambda: ngram_drafts(logits, count, 3), "tokens", "float32", "integers"),
        (lambda: ngram_drafts(drafts, count, 0), "num_drafts", "0", "at least 1"),
    ]:
        with pytest.raises((TypeError, ValueError), match=says(*words)):
            call()
