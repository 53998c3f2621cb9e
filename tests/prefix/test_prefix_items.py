"""Multimodal items in the prefix cache: a digest in place of token ids, reused whole or not at all."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants
from tests.support.prefix_user import CONFIG, PrefixUser

NO_ITEM = [0, 0]
# Text at 0-4, an image at 5-14, text at 15-17, another image at 18-25, text.
ITEMS = [[5, 15], [18, 26]]


def prompt(first=b"cat", second=b"dog", tail=(8, 9)):
    text = [1, 2, 3, 4, 5], [6, 7, 8], list(tail)
    images = kv.item_tokens(first, 10), kv.item_tokens(second, 8)
    return np.concatenate([text[0], images[0], text[1], images[1], text[2]]).astype(np.int32)


def published(tokens):
    user = PrefixUser(CONFIG)
    user.start(0, tokens.tolist())
    return user


def two(user, tokens, items):
    """Lengths, prompts and items of one or two rows, filled up to two, so that one program serves all."""
    tokens, items = [*tokens, []][:2], [*items, *[[NO_ITEM] * 2] * 2][:2]
    return [len(each) for each in tokens], user.prompts(tokens), np.array(items)


def look_up(user, tokens, items):
    lengths, prompts, items = two(user, tokens, items)
    return kv.lookup(user.cache, prompts, lengths, items=items).tolist()


def allocate(user, rows, tokens, items):
    """The cache, and what it found of each row's prompt: tokens and items."""
    lengths, prompts, items = two(user, tokens, items)
    rows = [*rows, CONFIG.max_seqs][:2]
    cache, admission = kv.allocate(user.cache, rows, lengths, tokens=prompts, items=items)
    return cache, admission.num_cached.tolist(), admission.num_items_cached.tolist()


@pytest.fixture(scope="module")
def user():
    return published(prompt())


@pytest.mark.parametrize(
    ("tokens", "num_cached", "num_items"),
    [
        (prompt(tail=(8, 9, 10, 11)), 28, 2),  # 7 full blocks, both images within
        (prompt(second=b"bird"), 16, 1),  # 16 of 18 equal tokens, after the first image
        (prompt(first=b"bird"), 4, 0),  # one block of text before the first image
        (prompt()[:22], 16, 1),  # 20 would end inside the second image
        (prompt()[:14], 4, 0),  # 12 would end inside the first one
    ],
)
def test_a_hit_never_ends_inside_an_item(user, tokens, num_cached, num_items):
    cache, *found = allocate(user, [1], [tokens], [ITEMS])
    assert found == [[num_cached, 0], [num_items, 0]]
    assert look_up(user, [tokens], [ITEMS]) == [num_cached, 0]
    assert_invariants(cache)


@pytest.mark.slow
def test_rows_with_fewer_items_and_none(user):
    tokens = prompt()[:22]
    _, *found = allocate(user, [1, 2], [tokens] * 2, [[[5, 15], NO_ITEM], ITEMS])
    assert found == [[20, 16], [1, 1]]
    assert user.lookup(tokens.tolist()) == 20
    _, admission = kv.allocate(
        user.cache, user.padded([3]), user.padded([22], 0), tokens=user.prompts([tokens, [], [], []])
    )
    assert (admission.num_cached.tolist(), admission.num_items_cached.tolist()) == ([20, 0, 0, 0], [0] * 4)
    with pytest.raises(ValueError, match=r"items has \[15, 5\], expected .* 0 <= first <= end"):
        allocate(user, [3], [tokens], [[NO_ITEM, [15, 5]]])


def test_a_digest_is_no_token_id_and_has_a_word_per_position():
    words = kv.item_tokens(b"cat", 64)
    assert words.dtype == np.int32 and (words < 0).all() and len(set(words.tolist())) == 64
    assert (words != kv.item_tokens(b"cab", 64)).all()


def test_an_item_of_another_size_is_another_item():
    """The same image in 12 positions and in 4: its first 4 keys are others."""
    tokens = np.concatenate([kv.item_tokens(b"cat", 12), [1, 2]])
    small = np.concatenate([kv.item_tokens(b"cat", 4), [1, 2]])
    items = [[[0, 4], NO_ITEM], [[0, 12], NO_ITEM]]
    assert look_up(published(tokens), [small, tokens], items) == [0, 12]


def test_items_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"items has shape \(2, 2\), expected \(1, any, 2\)"):
        kv.allocate(kv.init(CONFIG), [0], [5], tokens=[[1] * 5], items=ITEMS)
