"""What `explain` says of a miss, case by case; it says no more of other namespaces than that they have it."""

import dataclasses
import importlib

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_same, leaf_bytes
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser
from tests.support.random_script import padded

WHY = "never committed, or evicted, reset or scrubbed since."
NOTHING = f"Nothing is cached in this namespace: {WHY}"
ELSEWHERE = "More of it is cached in another namespace, where this one may not look."


def ask(user, text, **options):
    """One width for all prompts, so that one program looks them up."""
    return kv.inspect.explain(user.cache, user.prompts([text])[0], len(text), **options)


def explain(user, text, namespace=None):
    """The sentences; the figure in the first is what `allocate` finds."""
    before = leaf_bytes(user.cache)
    said = ask(user, text, namespace=namespace)
    assert_same(before, user.cache)
    found = user.lookup(text, namespace)
    assert said.startswith(f"{found} of {len(text)} tokens are cached")
    return said


@pytest.fixture(scope="module")
def two_texts():
    """Two cached texts that part at token 6, the second of them longer."""
    user = PrefixUser(CONFIG)
    user.start(0, [1, 2, 3, 4, 5, 6, 7, 8])
    user.start(1, [1, 2, 3, 4, 5, 6, 17, 18, 19, 20, 21, 22])
    user.free(0)
    return user


ALL = "That is all that can be: the last token is always computed, and blocks have 4 tokens."
DIFFERS = "At position {} the prompt has token {}, where the nearest cached sequence has {}."


@pytest.mark.parametrize(
    ("text", "num_cached", "why"),
    [
        ([1, 2, 3, 4, 5, 9, 7, 8, 9], 4, DIFFERS.format(5, 9, 6)),
        ([1, 2, 3, 4, 5, 6, 17, 9, 9], 4, DIFFERS.format(7, 9, 18)),
        ([9, 2, 3, 4, 5], 0, DIFFERS.format(0, 9, 1)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, ALL),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, ALL),
        ([1, 2, 3, 4], 0, ALL),
        (list(range(1, 14)), 8, f"No cached sequence goes on after position 8: {WHY}"),
    ],
)
def test_where_a_prompt_leaves_what_is_cached(two_texts, text, num_cached, why):
    assert explain(two_texts, text) == f"{num_cached} of {len(text)} tokens are cached. {why}"


def test_an_empty_prompt(two_texts):
    assert explain(two_texts, []) == "0 of 0 tokens are cached: the prompt is empty."


def test_what_was_evicted_or_is_not_committed():
    user = PrefixUser(CONFIG)
    text = list(range(1, 14))
    nothing = f"0 of 13 tokens are cached. {NOTHING}"
    assert explain(user, text) == nothing
    user.admit(0, text)
    user.fill(0)
    held = "of 13 tokens are cached. A row holds the tokens from position {} on, but they are not published: "
    held += "commit it."
    assert explain(user, text) == "0 " + held.format(0)
    assert explain(user, [*text[:3], 99, 5, 6]) == nothing.replace("13", "6")
    user.commit(0, final_len=[8])
    assert explain(user, text) == "8 " + held.format(8)
    user.commit(0)
    user.free(0)
    user.cache, _ = kv.evict(user.cache, 1)
    gone = "of 13 tokens are cached. The block from position {} on was cached, and evicted since."
    assert explain(user, text) == "8 " + gone.format(8)
    user.cache, _ = kv.evict(user.cache, 2)
    assert explain(user, text) == "0 " + gone.format(0)
    assert explain(user, [*text[:3], 99, 5, 6]) == nothing.replace("13", "6")
    assert explain(user, text, TENANT_A) == nothing
    for row in range(2):
        user.admit(row, [50, *range(100 * row + 100, 100 * row + 147)])
    user.fill(0, 1)  # all blocks, and none is published
    assert explain(user, text) == "0 " + gone.format(0)
    user.commit(0, 1)
    user.free(0, 1)
    assert explain(user, text) == f"0 of 13 tokens are cached. {DIFFERS.format(0, 1, 50)}"


def test_an_eviction_is_told_where_something_else_goes_on():
    """Of two texts that part, one was evicted: not the token where they part is why it is not found."""
    user = PrefixUser(CONFIG)
    user.start(0, [1, 2, 3, 4, 5, 6, 7, 8])
    user.free(0)
    user.start(1, [1, 2, 3, 4, 5, 6, 17, 18])
    user.cache, _ = kv.evict(user.cache, 1)
    asked = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert explain(user, asked) == (
        "4 of 9 tokens are cached. The block from position 4 on was cached, and evicted since."
    )
    other = [1, 2, 3, 4, 5, 6, 9, 8, 9]
    assert explain(user, other) == f"4 of 9 tokens are cached. {DIFFERS.format(6, 9, 17)}"


def test_other_namespaces_are_not_described():
    user = PrefixUser(CONFIG)
    text = list(range(1, 14))
    user.start(0, text, TENANT_A)
    assert explain(user, text, TENANT_B) == f"0 of 13 tokens are cached. {NOTHING} {ELSEWHERE}"
    user.start(1, [1, 2, 3, 4, 5, 96, 97, 98, 99], TENANT_B)
    said = explain(user, text, TENANT_B)
    assert said == f"4 of 13 tokens are cached. {DIFFERS.format(5, 6, 96)} {ELSEWHERE}"
    # It has the same or less: nothing to say. Its tokens are never named.
    for other in ([1, 2, 3, 4, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9, 9]):
        said = explain(user, other, TENANT_B)
        assert said.endswith("has 5." if other[4] == 9 else "has 96.")
    assert explain(user, [9] * 9, kv.namespace(tenant="c")) == f"0 of 9 tokens are cached. {NOTHING}"


class Counted(np.ndarray):
    """An array that adds the elements of all arithmetic on it and its parts to `num_seen`."""

    num_seen = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        Counted.num_seen += max(np.size(array) for array in inputs)
        return getattr(ufunc, method)(*map(np.asarray, inputs), **options)


@pytest.mark.slow
def test_blocks_are_not_searched_for_each_block_of_the_prompt(monkeypatch):
    """Neither where other namespaces have the prompt too: their blocks are met once."""
    module = importlib.import_module("kvcache_jax.inspect.explain_miss")
    make_view = module._view

    def counted_view(cache):
        fields = make_view(cache)._asdict().items()
        arrays = {name: value.view(Counted) for name, value in fields if isinstance(value, np.ndarray)}
        return make_view(cache)._replace(**arrays)

    sizes = dict(num_blocks=160, block_size=4, max_seqs=4, max_seq_len=164)
    config = kv.CacheConfig([kv.FullAttention(1, 5)], **sizes, enable_prefix_caching=True)
    text, cache = np.arange(160, dtype=np.int32)[None], kv.init(config, storage=False)
    for row, name in enumerate("abc"):
        words = kv.namespace(tenant=name)
        cache, _ = kv.allocate(cache, [row], [160], tokens=text, namespace=words)
        cache, _ = kv.extend(cache, [160], max_new=160, seq_ids=[row], tokens=text)
        cache, _ = kv.commit(cache, [row])
    monkeypatch.setattr(module, "_view", counted_view)
    other = np.append(text[0, :80], [999] * 9).astype(np.int32)
    assert (
        kv.inspect.explain(cache, other, namespace=words)
        == f"80 of 89 tokens are cached. {DIFFERS.format(80, 999, 80)}"
    )
    assert 80 <= Counted.num_seen < 10 * 160


def test_what_was_reset_is_not_said_to_wait_for_a_first_commit():
    user, text = PrefixUser(CONFIG), list(range(1, 14))
    user.start(0, text)
    user.cache, _ = kv.reset_prefix_cache(user.cache)
    assert explain(user, text).endswith("from position 0 on, but they are not published: commit it.")
    user.commit(0)
    assert explain(user, text) == f"12 of 13 tokens are cached. {ALL}"
    user.free(0)
    user.cache, _ = kv.reset_prefix_cache(user.cache)
    assert explain(user, text) == f"0 of 13 tokens are cached. {NOTHING}"


def test_a_prompt_that_no_row_can_hold(two_texts):
    assert kv.inspect.explain(two_texts.cache, [1, 2, 3, 4, 5, 6, 7, 8, *range(41)]) == (
        "0 of 49 tokens are cached: allocate refuses prompts of more than 48 tokens, the cache's max_seq_len."
    )


def test_the_words_of_items_are_not_told():
    """A caller who has them could ask for the item's blocks."""
    user = PrefixUser(CONFIG)
    image, other = (kv.item_tokens(name, 3).tolist() for name in (b"an image", b"another"))
    user.start(0, [1, *image, 5])
    for prompt, position, has in (([1, *other, 5], 1, "a word of an item"), ([1, 2, 3, 4, 5], 1, "token 2")):
        expected = f"At position {position} the prompt has {has}, where the nearest cached sequence has"
        assert ask(user, prompt) == f"0 of 5 tokens are cached. {expected} a word of an item."


def test_an_item_that_would_be_cut():
    """The item is computed whole; why no more than its beginning is there is said as well."""
    user = PrefixUser(CONFIG)
    image = kv.item_tokens(b"an image", 5).tolist()
    user.start(0, [1, 2, *image, 9, 9, 9])
    prompt = [1, 2, *image, 7, 7, 7]
    items = [[2, 7]]
    found = kv.lookup(user.cache, user.prompts([prompt]), [10], items=[items])
    differs = DIFFERS.format(7, 7, 9)
    cut = "The blocks of 4 are there, but what is reused must not end within an item."
    assert found.tolist() == [0]
    assert ask(user, prompt, items=items) == f"0 of 10 tokens are cached. {cut} {differs}"
    assert ask(user, prompt) == f"4 of 10 tokens are cached. {differs}"
    assert ask(user, prompt[:5], items=[[2, 5]]) == f"0 of 5 tokens are cached. {cut}"
    assert ask(user, prompt, items=[]) == ask(user, prompt)
    for wrong, shape in (([2, 7], r"\(2,\)"), ([items], r"\(1, 1, 2\)")):
        with pytest.raises(ValueError, match=rf"items has shape {shape}, expected \(any, 2\)"):
            ask(user, prompt, items=wrong)


@pytest.mark.slow
def test_another_namespace_is_named_where_it_would_serve_more():
    """By what `allocate` would find in it: a window may have let go of what the other group still has."""
    window = kv.SlidingWindow(1, 5, window=3, num_blocks=3)
    layers = [*CONFIG.layers, window]
    config = dataclasses.replace(CONFIG, layers=layers, num_blocks=24, max_query_len=4)
    prompt = list(range(1, 10))
    needed = "another has let go of blocks that are needed at that length, or none of its blocks ends there."
    cache = computed_in_steps(kv.init(config, storage=False), list(range(1, 21)), TENANT_A)
    assert int(kv.lookup(cache, [prompt], [9], TENANT_A)[0]) == 0  # of the window the end alone is there
    assert kv.inspect.explain(cache, prompt, namespace=TENANT_B) == f"0 of 9 tokens are cached. {NOTHING}"
    cache = computed_in_steps(cache, prompt[:8], TENANT_B)
    assert int(kv.lookup(cache, [prompt], [9], TENANT_B)[0]) == 8
    assert kv.inspect.explain(cache, prompt, namespace=TENANT_A).endswith(f"{needed} {ELSEWHERE}")


def computed_in_steps(cache, text, namespace):
    """The cache after row 0 computed the text four tokens at a time, publishing as it went, and ended."""
    tokens = padded([text], 20)
    cache, _ = kv.allocate(cache, [0], [len(text)], tokens=tokens, namespace=namespace)
    while (start := int(cache.context_len[0])) < len(text):
        cache, _ = kv.extend(cache, [4], max_new=4, seq_ids=[0], tokens=tokens[:, start : start + 4])
        cache, _ = kv.commit(cache, [0])
    return kv.free(cache, [0])[0]


def test_without_prefix_caching():
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 5)], num_blocks=4, max_seqs=2, max_seq_len=32))
    assert kv.inspect.explain(cache, [1, 2]).startswith(
        "0 of 2 tokens are cached: the cache was built without prefix"
    )


def test_absurd_arguments():
    cache = kv.init(CONFIG)
    with pytest.raises(ValueError, match="num_tokens is 3, expected 0 <= num_tokens <= tokens = 2"):
        kv.inspect.explain(cache, [1, 2], 3)
    with pytest.raises(ValueError, match="uint32"):
        kv.inspect.explain(cache, [1, 2], 2, np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="expected a list of token ids"):
        kv.inspect.explain(cache, [[1, 2]])
