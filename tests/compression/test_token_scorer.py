"""The scorers of tokens, against kvpress's definitions in numpy, row by row; and one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.compression import scorers

ROWS, Q_HEADS, KV_HEADS, PLACES, WIDTH, DIM = 3, 4, 2, 30, 9, 6
LENGTHS, NUM_QUERIES = [30, 21, 12], [9, 9, 4]
GROUPS = Q_HEADS // KV_HEADS
rng = np.random.default_rng(0)


def metadata():
    """Rows of odd lengths, NaN in the keys and values of places without a token."""
    lengths = np.array(LENGTHS)
    attention = np.zeros((ROWS, Q_HEADS, WIDTH, PLACES), np.float32)
    for row in range(ROWS):
        for i in range(NUM_QUERIES[row]):
            num_seen = LENGTHS[row] - NUM_QUERIES[row] + i + 1
            attention[row, :, i, :num_seen] = rng.dirichlet(np.ones(num_seen), Q_HEADS)
    k, v = (rng.standard_normal((ROWS, KV_HEADS, PLACES, DIM), np.float32) for _ in "kv")
    is_token = np.arange(PLACES)[None] < lengths[:, None]
    for x in (k, v):
        x[np.broadcast_to(~is_token[:, None], x.shape[:3])] = np.nan
    mean = rng.standard_normal((ROWS, Q_HEADS, DIM), np.float32)
    root = rng.standard_normal((ROWS, Q_HEADS, DIM, DIM), np.float32)
    covariance = root @ root.swapaxes(-1, -2)
    return kv.compression.TokenMetadata(
        is_token=is_token,
        num_tokens=jnp.array(LENGTHS),
        num_queries=jnp.array(NUM_QUERIES),
        num_kv_heads=KV_HEADS,
        k=k,
        v=v,
        attention=attention,
        queries=(mean, covariance),
        key=None,
    )


TOKENS = metadata()


def of_groups(x):
    return x.reshape(KV_HEADS, GROUPS, *x.shape[1:]).mean(axis=1)


def snapkv(attention, **_):
    num_queries = attention.shape[1]
    scores = attention[..., :-num_queries].mean(axis=1)
    padded = np.pad(scores, ((0, 0), (2, 2)))
    pooled = of_groups(np.stack([padded[:, i : i + scores.shape[1]] for i in range(5)]).mean(axis=0))
    last = np.broadcast_to(pooled.max(axis=1, keepdims=True) + 1, (KV_HEADS, num_queries))
    return np.concatenate([pooled, last], axis=1)


def h2o(attention, **_):
    num_queries, length = attention.shape[1:]
    num_seeing = np.minimum(np.arange(length, 0, -1), num_queries)
    return of_groups(attention.sum(axis=1) / num_seeing)


def tova(attention, **_):
    scores = np.tile(attention[:, -1].mean(axis=0), (KV_HEADS, 1))
    scores[:, -1] = scores.max() + 1
    return scores


def keydiff(k, **_):
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchor = unit.mean(axis=1, keepdims=True)
    return -(unit * anchor).sum(axis=-1) / np.linalg.norm(anchor, axis=-1)


def knorm(k, **_):
    return -np.linalg.norm(k, axis=-1)


def expected_attention(k, v, mean, covariance, **_):
    keys = np.repeat(k, GROUPS, axis=0)[:, 4:]
    logits = np.einsum("hsd,hd->hs", keys, mean) / DIM**0.5
    logits += np.einsum("hsd,hde,hse->hs", keys, covariance, keys) / DIM / 2
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = of_groups(shares / shares.sum(axis=1, keepdims=True))
    scores = (shares + 1e-2) * np.linalg.norm(v[:, 4:], axis=-1)
    sinks = np.broadcast_to(scores.max(axis=1, keepdims=True) + 1, (KV_HEADS, 4))
    return np.concatenate([sinks, scores], axis=1)


def recency(k, **_):
    places = np.arange(k.shape[1], dtype=float)
    places[:4] = np.inf
    return np.tile(places, (KV_HEADS, 1))


@pytest.mark.parametrize("expected", [snapkv, h2o, tova, keydiff, knorm, expected_attention, recency])
def test_a_scorer_is_what_kvpress_says(expected):
    name = expected.__name__.replace("_", " ")
    tokens, num_last = TOKENS, 1 if expected is tova else WIDTH
    if expected is tova:  # the scorer asks for the last query alone
        last = np.stack([TOKENS.attention[row, :, num - 1 : num] for row, num in enumerate(NUM_QUERIES)])
        tokens = tokens._replace(attention=last, num_queries=jnp.ones(ROWS, jnp.int32))
    scores = np.asarray(scorers.scores_by(name, tokens))
    assert scores.shape == (ROWS, KV_HEADS, PLACES)
    for row, length in enumerate(LENGTHS):
        num_queries = min(NUM_QUERIES[row], num_last)
        want = expected(
            attention=TOKENS.attention[row][:, : NUM_QUERIES[row], :length][:, -num_queries:],
            k=TOKENS.k[row, :, :length],
            v=TOKENS.v[row, :, :length],
            mean=TOKENS.queries[0][row],
            covariance=TOKENS.queries[1][row],
        )
        np.testing.assert_allclose(scores[row, :, :length], want, rtol=2e-5, atol=1e-6)


NAMES = ["snapkv", "h2o", "tova", "keydiff", "knorm", "expected attention", "recency"]


@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_a_number_also_in_rows_of_few_tokens_and_of_no_new_ones(name):
    """And no 0 / 0 is computed on the way, where a caller has `jax_debug_nans`: a slot may hold zeros."""
    lengths = np.array([3, 21, 0])
    is_token = np.arange(PLACES)[None] < lengths[:, None]
    arrays = {field: np.nan_to_num(getattr(TOKENS, field)) for field in ("k", "v")}
    tokens = TOKENS._replace(
        is_token=is_token,
        num_tokens=jnp.array(lengths),
        num_queries=jnp.array([3, 0, 0]),
        attention=TOKENS.attention * is_token[:, None, None] * (lengths == 3)[:, None, None, None],
        **{field: x * is_token[:, None, :, None] for field, x in arrays.items()},
    )
    stopped = None
    try:
        with jax.debug_nans(True):
            scores = np.asarray(scorers.scores_by(name, tokens))
    except FloatingPointError as error:
        stopped = error
    assert stopped is None
    assert not np.isnan(scores[np.broadcast_to(is_token[:, None], scores.shape)]).any()


def test_chance_differs_by_head_and_key():
    first, second = (
        np.asarray(scorers.scores_by("random", TOKENS._replace(key=jax.random.key(i)))) for i in (0, 1)
    )
    assert (first != second).any() and (first[:, 0] != first[:, 1]).any()


def test_queries_to_come_are_the_mean_and_spread_of_turned_ones():
    """Against the queries themselves, turned by hand to each position to come."""
    q = rng.standard_normal((2, 5, 1, 2), np.float32)
    is_query = np.arange(5)[None] < np.array([5, 3])[:, None]

    def rotate(x, positions):
        cos, sin = (f(positions.astype(np.float32) * 0.3)[:, None] for f in (np.cos, np.sin))
        return np.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], axis=-1)

    def traced(x, positions):
        cos, sin = (f(positions.astype(jnp.float32) * 0.3)[:, None] for f in (jnp.cos, jnp.sin))
        return jnp.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], axis=-1)

    future = jax.jit(
        lambda *arguments: kv.compression.future_queries(*arguments, num_future=3), static_argnums=2
    )
    mean, covariance = map(np.asarray, future(q, is_query, traced, np.array([5, 3])))
    for row, length in enumerate((5, 3)):
        at = np.arange(length, length + 3)
        given = q[row, :length, 0]
        turned = rotate(np.broadcast_to(given, (3, *given.shape)), at).mean(axis=0)
        np.testing.assert_allclose(mean[row, 0], turned.mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(covariance[row, 0], np.cov(turned.T, bias=True), rtol=1e-3, atol=1e-5)


def test_budgets_fall_from_layer_to_layer_and_keep_the_average():
    budgets = np.asarray(kv.compression.pyramid_budgets(np.array([96, 300]), 6, 64, np.array([768, 400])))
    assert budgets[0].tolist() == [126, 114, 102, 90, 78, 66]
    assert budgets[1, 0] == 400 and (np.diff(budgets) < 0).all()  # no more than the row has
    np.testing.assert_allclose(budgets.mean(axis=1), [96, 300], atol=0.5)
    alone, *short = kv.compression.pyramid_budgets([96, 96, 96, 9], 1, 64, [768, 80, 40, 80]).tolist()
    assert [alone, *short] == [[96], [80], [40], [64]]
    short = kv.compression.pyramid_budgets([96, 96, 9], 3, 64, [80, 40, 80])
    assert short.tolist() == [[80] * 3, [40] * 3, [64] * 3]


def test_scorers_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(scorers.scorers, "_entries", dict(scorers.scorers._entries))
    with pytest.raises(ValueError, match="there is a token scorer 'h2o' already"):
        kv.compression.token_scorer("h2o")
    with pytest.raises(ValueError, match="needs is \\['q'\\], expected some of"):
        kv.compression.token_scorer("mine", needs=["q"])
    with pytest.raises(TypeError, match="name is <function"):
        kv.compression.token_scorer(lambda tokens: tokens.k)
    with pytest.raises(TypeError, match="the token scorer 'mine' is 3, expected a function"):
        kv.compression.token_scorer("mine")(3)
    with pytest.raises(ValueError, match="scorer is 'mine', expected one of 'snapkv', 'h2o'"):
        scorers.scores_by("mine", TOKENS)
    kv.compression.token_scorer("mine")(lambda tokens: tokens.is_token)
    with pytest.raises(TypeError, match="token scorer 'mine' returned bool\\[3, 30\\], expected float32"):
        scorers.scores_by("mine", TOKENS)
    kv.compression.token_scorer("asks")(lambda tokens: tokens.v.sum(axis=-1))
    with pytest.raises(AttributeError) as raised:
        scorers.scores_by("asks", TOKENS._replace(v=None))
    assert "token scorer 'asks' has needs=[] and sees no other optional metadata" in raised.value.__notes__
    kv.compression.token_scorer("flat")(lambda tokens: np.float32(tokens.is_token))
    assert scorers.scores_by("flat", TOKENS).shape == (ROWS, KV_HEADS, PLACES)


def test_what_scorers_do_not_take_is_refused():
    config = kv.CacheConfig([kv.FullAttention(2, 8)], num_blocks=4, block_size=4, max_seqs=2, max_seq_len=8)
    cache, _ = kv.allocate(kv.init(config), [0], [4])
    cache, step = kv.extend(cache, [4, 0], max_new=4)
    q, is_query = jnp.ones((2, 4, 4, 8)), np.ones((2, 4), bool)

    def score(scorer, q=q, **options):
        return kv.compression.token_scores(cache, 0, q, step, scorer, **options)

    def future(q=q, is_query=is_query, rotate=lambda x, _: x, positions=(4, 4), num_future=3):
        return kv.compression.future_queries(q, is_query, rotate, positions, num_future=num_future)

    mean, covariance = future()
    assert score("expected attention", queries=(mean, covariance)).shape == (2, 2, 8)
    for call, message in (
        (lambda: score("snapkv", q=None), "q is a NoneType, expected an array"),
        (lambda: score("tova", q=np.ones(3)), r"q has shape \(3,\), expected \(2, 4, 'num_q_heads', 8\)"),
        (
            lambda: score("recency", scal=2.0),
            r"token_scores got \['scal'\], expected options among scale, soft",
        ),
        (lambda: score("random", key=3), "key is 3, expected one key of jax.random"),
        (lambda: score("expected attention", queries=3), r"queries has shapes \[\], expected what future_q"),
        (
            lambda: score("expected attention", queries=(mean, mean)),
            r"queries has shapes \[\(2, 4, 8\), \(2, 4",
        ),
        (
            lambda: score("expected attention", queries=(mean[:, :3], covariance[:, :3])),
            "a multiple of num_kv",
        ),
        (lambda: future(q=None), "q is a NoneType, expected an array"),
        (lambda: future(q=q[0]), r"q has shape \(4, 4, 8\), expected \[n, T, num_q_heads, key_dim\]"),
        (lambda: future(is_query=is_query[:, :3]), r"is_query is bool\[2, 3\], expected bool\[2, 4\]"),
        (lambda: future(rotate=3), "rotate is 3, expected a function of queries and positions"),
        (
            lambda: future(rotate=lambda x, _: None),
            r"rotate returned shape None, expected \(.*\) as its",
        ),
        (lambda: future(positions=[4]), "next_position has 1 rows, expected 2"),
        (lambda: future(num_future=0), "num_future is 0, expected 1 <= num_future"),
        (
            lambda: future(num_future=2**40),
            r"num_future is 1099511627776, expected 1 <= num_future <= 2\*\*30",
        ),
        (
            lambda: kv.compression.pyramid_budgets(96, 6, 64, [768]),
            r"num_keep has shape \(\), expected one int",
        ),
        (lambda: kv.compression.pyramid_budgets([96], 6, 64, [7, 8]), "num_tokens has 2 rows, expected 1"),
        (lambda: kv.compression.pyramid_budgets([96], 0, 64, [768]), "num_layers is 0, expected at least 1"),
        (lambda: kv.compression.pyramid_budgets([96], 6, -1, [768]), "window is -1, expected at least 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
