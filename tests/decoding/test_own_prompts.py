"""Prompts and retentions of a user's own: a wrong answer is refused by name, and no call waits for ever."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import kvcache_jax as kv

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 8)],
    num_blocks=16,
    block_size=4,
    max_seqs=2,
    max_seq_len=32,
    enable_prefix_caching=True,
)
OTHER = dataclasses.replace(CONFIG, max_seqs=3)
PROMPT = [1, 2, 3, 4, 5, 6]


def forward(params, tokens, cache, step):
    k = jnp.zeros((*tokens.shape, 1, 8))
    cache, _ = kv.attention(cache, 0, k, k, k, step)
    return 9.0 * jax.nn.one_hot(tokens + 1, 32), cache


def source(namespaces=None, rows=None, **own):
    made = {"rows": rows or (lambda self, call: type("Own", (kv.decoding.PromptRows,), own)(call))}
    made |= {"namespaces": namespaces} if namespaces else {}
    return type("Source", (kv.decoding.PromptSource,), made)([PROMPT])


def generate(prompts=(PROMPT,), **options):
    return kv.generate(forward, {}, prompts, CONFIG, max_new_tokens=2, **options)


def score(prompts, **options):
    return kv.score(forward, {}, prompts, [[7, 8]], CONFIG, **options)


def returned(value):
    return lambda *_: value


def started(self, cache, prompt_id, row):
    return kv.allocate(cache, [row], [3], tokens=[[1, 2, 3]])[0], ()


PROMPTS = {
    "namespaces": (
        dict(namespaces=returned(None)),
        "Source.namespaces() returned a NoneType, expected uint32[1",
    ),
    "rows": (dict(rows=returned(5)), "Source.rows() returned a int, expected a PromptRows"),
    "prefix": (dict(prefix_len=returned(-1)), "Own.prefix_len(0) is -1, expected 0 <="),
    "a part of a prefix": (dict(prefix_len=returned(2.5)), "Own.prefix_len(0) is 2.5, expected an integer"),
    "hold": (dict(hold=lambda self, cache, *_: cache), "Own.hold() returned a Cache, expected the cache and"),
    "no parts": (dict(hold=lambda self, cache, *_: (cache, None)), "hold() returned None for prompt 0, and"),
    "another cache": (dict(hold=lambda *_: (kv.init(OTHER), ())), "Own.hold() returned a cache of another"),
    "a row that stays": (dict(hold=started), "(row 0: SEQ_IN_USE)"),
    "fill": (dict(fill=returned(None)), "Own.fill() returned a NoneType, expected the cache that it got"),
    "a row that is freed": (
        dict(fill=lambda self, cache, prompt_id, row, parts: kv.free(cache, [row])[0]),
        "Own.fill() left 0 tokens in row 0, of prompt 0, expected fewer than its 6",
    ),
    "make_room": (dict(make_room=returned(None)), "Own.make_room() returned a NoneType"),
}
ENDS = {
    "room": (dict(with_room=returned(None)), "Own.with_room() returned a NoneType"),
    "keep": (
        dict(keep_end=lambda self, cache, *_: (cache, 1.5)),
        "Own.keep_end() is 1.5, expected an integer",
    ),
}
RETENTIONS = {
    "no retention": (508, "retention is 508, expected"),
    "hash": (dict(__hash__=None), "cannot be hashed"),
    "span": (dict(span=4), "Own.span is a int, expected a Span"),
    "prefill": (dict(prefill_len=returned(0)), "Own.prefill_len() is 0, expected 1 <="),
    "held": (dict(max_held_len=returned(0)), "Own.max_held_len() is 0, expected at least 32"),
    "text": (dict(max_text_len=returned(6)), "Own.max_text_len() is 6, expected 7 <="),
    "drop": (dict(drop_unseen=returned(None)), "Own.drop_unseen() returned a NoneType"),
    "another cache": (
        dict(drop_unseen=lambda *_: kv.init(OTHER)),
        "Own.drop_unseen() returned a cache of another config",
    ),
}


def refused(call, error):
    with pytest.raises((TypeError, ValueError, kv.StatusError)) as raised:
        call()
    assert error in str(raised.value)


@pytest.mark.parametrize("loop", [generate, score])
@pytest.mark.parametrize("case", PROMPTS)
def test_wrong_answers_of_prompts_are_refused(case, loop):
    own, error = PROMPTS[case]
    refused(lambda: loop(source(**own)), error)


@pytest.mark.parametrize("case", ENDS)
def test_wrong_answers_of_prompts_that_generate_alone_asks_for_are_refused(case):
    own, error = ENDS[case]
    refused(lambda: generate(source(**own)), error)


@pytest.mark.parametrize("case", RETENTIONS)
def test_wrong_answers_of_retentions_are_refused(case):
    own, error = RETENTIONS[case]
    retention = type("Own", (kv.decoding.Retention,), own)() if isinstance(own, dict) else own
    refused(lambda: generate(retention=retention), error)


@pytest.mark.parametrize("loop", [generate, score])
def test_prompts_are_published_in_the_namespaces_that_their_source_names(loop):
    words = kv.namespace(tenant="a feature")
    cache = loop(source(namespaces=lambda self, found: found * 0 + words)).cache
    assert [int(kv.lookup(cache, [PROMPT], [6], space)[0]) for space in (None, words)] == [0, 4]
