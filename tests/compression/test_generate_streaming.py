"""`generate` past `max_seq_len` in fixed memory, against the model without a cache and an explicit mask."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.decoding import loop, prefill
from tests.support import tiny_model
from tests.support.dense_reference import dense_attention
from tests.support.helpers import first_program
from tests.support.tiny_model import VOCAB, forward, make_params

PARAMS = make_params()
# A text is up to five times as long as what a row may hold.
LENGTH, MAX_LEN, NUM_NEW = 128, 24, 60
STREAMING = kv.compression.Streaming(window=9, num_sink_tokens=3)
PROMPTS = [np.random.default_rng(i).integers(VOCAB, size=n).tolist() for i, n in enumerate((7, 61, 1, 30))]
# The sinks' block, the window, the tokens of a call (5), and what was dropped in the window's first block.
MOST_BLOCKS = (4 + 8 + 5 + 3) // 4
# What four rows come to hold: a decode step has one new token.
NUM_BLOCKS = 4 * (MOST_BLOCKS - 1)


def config(**sizes):
    return tiny_model.config(
        **{"num_blocks": NUM_BLOCKS, "max_seq_len": MAX_LEN, "extras": [kv.compression.Dropping()]} | sizes
    )


def generate(prompts=PROMPTS, sizes=None, **options):
    options = {"max_new_tokens": NUM_NEW, "retention": STREAMING, "prefill_len": 5} | options
    return kv.generate(forward, PARAMS, prompts, config(**(sizes or {})), **options)


@functools.partial(jax.jit, static_argnames="reach")
def masked_logits(tokens, reach):
    """Logits of a text, of which each token sees the first tokens and a window of last ones, by layer."""

    def attention(cache, layer, q, k, v, step):
        reached = dict(zip(("window", "num_sink_tokens"), reach[layer], strict=True))
        return cache, dense_attention(q[0], k[0], v[0], **reached)[0][None]

    step = types.SimpleNamespace(positions=jnp.arange(LENGTH, dtype=jnp.int32)[None])
    return forward(PARAMS, tokens[None], None, step, attention)[0][0]


def check(generation, prompt, num_new=NUM_NEW, reach=((9, 3), (9, 3))):
    """Each token is the one that the mask over all tokens gives after those before it."""
    assert generation.finish_reason == "length" and len(generation.tokens) == num_new
    text = np.array([*prompt, *generation.tokens])
    logits = np.asarray(masked_logits(np.pad(text, (0, LENGTH - len(text))), reach))
    drawn = logits[len(prompt) - 1 : len(text) - 1]
    assert generation.tokens == drawn.argmax(axis=1).tolist()
    scores = jax.nn.log_softmax(drawn)[np.arange(num_new), generation.tokens]
    np.testing.assert_allclose(generation.logprobs, scores, atol=1e-4)


def test_a_text_goes_on_past_what_a_row_holds():
    """Prompts too, and blocks are the window's."""
    check_ins = []
    result = generate(watch=kv.decoding.Watch(on_check_in=check_ins.append, check_in_every=7))
    for prompt, generation in zip(PROMPTS, result.generations, strict=True):
        check(generation, prompt)
    held = np.concatenate([(check_in.block_tables[0] < NUM_BLOCKS).sum(axis=1) for check_in in check_ins])
    assert held.max() == MOST_BLOCKS - 1
    assert kv.check_invariants(result.cache) == []
    assert int(kv.stats(result.cache).num_blocks_free) == NUM_BLOCKS


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_calls_that_compute_them():
    [generation] = generate(PROMPTS[1:2], prefill_len=128).generations
    check(generation, PROMPTS[1])


@pytest.mark.slow
def test_samples_stream_from_the_prompt_that_they_share():
    """As many rows at a time as there are blocks for, each of which comes to hold nearly all of its own."""
    prompts, check_ins = [PROMPTS[1], PROMPTS[0]], []
    result = generate(prompts, num_samples=2)
    for i, generation in enumerate(result.generations):
        check(generation, prompts[i // 2])
    assert [check_in.num_active_seqs for check_in in result.timeline[:2]] == [4, 4]
    drawn = generate(
        prompts, num_samples=2, sampling=kv.decoding.SamplingParams(temperature=1.5, top_k=9)
    ).generations
    assert drawn[0].tokens != drawn[1].tokens

    def seen_enough(check_in):
        check_ins.append(check_in)
        raise StopIteration

    with pytest.raises(StopIteration):
        generate(
            prompts,
            dict(num_blocks=NUM_BLOCKS - 1),
            num_samples=2,
            watch=kv.decoding.Watch(on_check_in=seen_enough),
        )
    assert check_ins[0].num_active_seqs == 2


@pytest.mark.slow
def test_layers_with_windows_of_their_own_stream_too():
    """One that is narrower than what is streamed, and one that is wider."""
    layers = [kv.SlidingWindow(2, 4, window=n, num_sink_tokens=2, block_size=2) for n in (4, 9)]
    cfg = kv.CacheConfig(
        layers,
        num_blocks=40,
        max_seqs=4,
        max_seq_len=MAX_LEN,
        max_query_len=8,
        extras=[kv.compression.Dropping()],
    )
    options = dict(
        max_new_tokens=NUM_NEW, prefill_len=8, retention=kv.compression.Streaming(window=6, num_sink_tokens=2)
    )
    result = kv.generate(forward, PARAMS, PROMPTS, cfg, **options)
    for prompt, generation in zip(PROMPTS, result.generations, strict=True):
        check(generation, prompt, reach=((4, 2), (6, 2)))


def test_other_texts_compile_nothing():
    generate()
    sizes = [fn._cache_size() for fn in (prefill._feed_pieces, loop.begin, loop.decode)]
    generate([[1, 2, 3], PROMPTS[1][:50]], max_new_tokens=70)
    assert [fn._cache_size() for fn in (prefill._feed_pieces, loop.begin, loop.decode)] == sizes


@pytest.mark.slow
def test_no_program_of_a_stream_copies_a_pool(monkeypatch):
    names = ["decoding.prefill._feed_pieces", "decoding.loop.begin", "decoding.loop.decode"]
    texts = [first_program(monkeypatch, name) for name in names]
    cache = generate(PROMPTS[1:2]).cache
    shape = ",".join(map(str, cache.pools[0].k.shape))
    for [text] in texts:
        assert f"[{shape}]" in text and not re.findall(rf"\[{shape}\]\S* copy\(", text)


@pytest.mark.parametrize(
    ("sizes", "options", "error", "said"),
    [
        (
            {},
            dict(retention=508),
            TypeError,
            "retention is 508, expected",
        ),
        (
            dict(extras=[]),
            {},
            ValueError,
            "generate got streaming, expected a cache with extras=",
        ),
        (
            dict(extras=[], enable_prefix_caching=True),
            {},
            ValueError,
            "streaming and a cache with enable_prefix_caching=True, expected False",
        ),
        ({}, dict(drafts=kv.decoding.Drafts(2)), ValueError, "streaming and num_drafts = 2, expected 0"),
        (
            dict(max_seq_len=15),
            {},
            ValueError,
            "max_seq_len is 15, expected at least 16: 3 sinks, a wind",
        ),
        (dict(num_blocks=4), {}, ValueError, "prompt 1 has 61 tokens and needs 5 blocks"),
    ],
    ids=["no Streaming", "no drops", "prefixes", "drafts", "short rows", "few blocks"],
)
def test_what_cannot_stream_is_refused(sizes, options, error, said):
    with pytest.raises(error, match=said):
        generate(sizes=sizes, **options)


def test_a_streaming_is_checked():
    for window in (0, 2**30 + 1):
        with pytest.raises(ValueError, match=rf"window is {window}, expected 1 <= window <= 2\*\*30"):
            kv.compression.Streaming(window=window)
    with pytest.raises(ValueError, match=r"num_sink_tokens is 1099511627776, expected 0 <= num_sink_tokens"):
        kv.compression.Streaming(num_sink_tokens=2**40)
    with pytest.raises(TypeError, match="num_sink_tokens is 1.5, expected an integer"):
        kv.compression.Streaming(window=3, num_sink_tokens=1.5)
    layers = [kv.SlidingWindow(2, 4, window=6, num_sink_tokens=5)] * 2
    cfg = kv.CacheConfig(layers, max_seqs=4, max_seq_len=48, extras=[kv.compression.Dropping()])
    with pytest.raises(ValueError, match="has num_sink_tokens = 3, expected at least 5: the sinks of"):
        kv.generate(forward, PARAMS, PROMPTS, cfg, max_new_tokens=2, retention=STREAMING)


@pytest.mark.slow
def test_a_step_that_streams_is_exported():
    """What its queries may see goes along."""

    @jax.jit
    def attend(cache, q):
        cache, step = kv.extend(cache, [6, 0, 0, 0], max_new=6)
        return cache, plan_attention(cache, step, within=STREAMING.span), q

    @jax.jit
    def attended(cache, step, q):
        return kv.attention(cache, 0, q, q[:, :, :2], q[:, :, :2], step)[1]

    cache, _ = kv.allocate(kv.init(config()), [0], [6])
    q = np.random.default_rng(0).standard_normal((4, 6, 4, 4), np.float32)
    cache, step, q = attend(cache, q)
    restored = jax.export.deserialize(jax.export.export(attended)(cache, step, q).serialize())
    plan = jax.tree.unflatten(restored.in_tree, jax.tree.leaves(((cache, step, q), {})))[0][1].plans[0]
    assert plan.within == STREAMING.span
    np.testing.assert_array_equal(attended(cache, step, q), restored.call(cache, step, q))


@pytest.mark.slow
def test_a_piece_behind_dropped_tokens_tells_its_place_in_the_row():
    cache, _ = kv.allocate(kv.init(config(), storage=False), [2], [14])
    cache, _ = kv.extend(cache, [0, 0, 14, 0], max_new=14)
    cache, _ = kv.compression.drop(cache, [2], [3], [7])  # of which 4 to 7 are a block
    cache, step = kv.extend(cache, [5], num_tokens=6, seq_ids=[2])
    pieces = prefill.padded_step(step, np.array([0, 0]), np.array([14, 17]), np.array([3, 2]), (2, 3))
    assert pieces.context_len.tolist() == [14 - 4 + 3, 14 - 4 + 5]
    assert pieces.positions[0].tolist() == [14, 15, 16]
