"""Multimodal items in the prefix cache: a digest in place of token ids, reused whole or not at all."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import assert_invariants
from tests.support.random_script import padded

CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 4)],
    num_blocks=40,
    block_size=4,
    max_seqs=4,
    max_seq_len=40,
    enable_prefix_caching=True,
)
WIDTH = 32  # of all prompts
# Text at 0-4, an image at 5-14, text at 15-17, another image at 18-25, text.
ITEMS = [[5, 15], [18, 26]]


def prompt(first=b"cat", second=b"dog", tail=(8, 9)):
    text = [1, 2, 3, 4, 5], [6, 7, 8], list(tail)
    images = kv.item_tokens(first, 10), kv.item_tokens(second, 8)
    return np.concatenate([text[0], images[0], text[1], images[1], text[2]]).astype(np.int32)


def published(tokens):
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [len(tokens)], tokens=padded([tokens], WIDTH), items=[ITEMS])
    cache, _ = kv.extend(cache, [len(tokens)], max_new=WIDTH, seq_ids=[0], tokens=padded([tokens], WIDTH))
    return kv.commit(cache, [0])[0]


@pytest.mark.parametrize(
    ("tokens", "num_cached", "num_items"),
    [
        (prompt(tail=(8, 9, 10, 11)), 28, 2),  # 7 full blocks, both images within
        (prompt(second=b"bird"), 16, 1),  # 16 of 18 equal tokens, behind the first image
        (prompt(first=b"bird"), 4, 0),  # one block of text before the first image
        (prompt()[:22], 16, 1),  # 20 would end inside the second image
        (prompt()[:14], 4, 0),  # 12 would end inside the first one
    ],
)
def test_a_hit_never_ends_inside_an_item(tokens, num_cached, num_items):
    cache = published(prompt())
    prompts = padded([tokens], WIDTH)
    found = kv.lookup(cache, prompts, [len(tokens)], items=[ITEMS])
    cache, admission = kv.allocate(cache, [1], [len(tokens)], tokens=prompts, items=[ITEMS])
    assert found.tolist() == admission.num_cached.tolist() == [num_cached]
    assert admission.num_items_cached.tolist() == [num_items]
    assert_invariants(cache)


@pytest.mark.slow
def test_a_manager_takes_items_too():
    manager = kv.CacheManager(kv.init(CONFIG, storage=False))
    manager.allocate_request("first", prompt(), items=ITEMS)
    manager.append_tokens("first", prompt())
    manager.commit_tokens("first")
    cut = prompt()[:22]  # 20 would end inside the second image
    assert manager.allocate_request("second", cut, items=ITEMS) == 16
    assert manager.allocate_request("third", cut, items=ITEMS[:1]) == 20
    assert manager.allocate_request("third", cut, items=[[0, 4], *ITEMS], replace=True) == 16
    assert manager.allocate_request("fourth", cut) == 20
    with pytest.raises(ValueError, match=r"items has shape \(2,\), expected \(any, 2\)"):
        manager.allocate_request("fourth", cut, items=ITEMS[0], replace=True)
    for first, end in ((15, 5), (-1, 5)):
        with pytest.raises(ValueError, match=rf"items has \[{first}, {end}\], expected .* 0 <= first <= end"):
            manager.allocate_request("fourth", cut, items=[[0, 0], [first, end]], replace=True)


@pytest.mark.slow
def test_rows_with_fewer_items_and_none():
    cache, tokens = published(prompt()), padded([prompt()[:22]] * 2, WIDTH)
    items = [[[5, 15], [0, 0]], ITEMS]
    cache, admission = kv.allocate(cache, [1, 2], [22, 22], tokens=tokens, items=items)
    assert admission.num_cached.tolist() == [20, 16]
    assert admission.num_items_cached.tolist() == [1, 1]
    _, admission = kv.allocate(cache, [3], [22], tokens=tokens[:1])
    assert (admission.num_cached.tolist(), admission.num_items_cached.tolist()) == ([20], [0])
    with pytest.raises(ValueError, match=r"items has \[15, 5\], expected .* 0 <= first <= end"):
        kv.allocate(cache, [3], [22], tokens=tokens[:1], items=[[[0, 0], [15, 5]]])


def test_a_digest_is_no_token_id_and_has_a_word_per_position():
    words = kv.item_tokens(b"cat", 64)
    assert words.dtype == np.int32 and (words < 0).all() and len(set(words.tolist())) == 64
    assert (words != kv.item_tokens(b"cab", 64)).all()


def test_an_item_of_another_size_is_another_item():
    """The same image in 12 positions and in 4: its first 4 keys are others."""
    cache = kv.init(CONFIG)
    tokens = np.concatenate([kv.item_tokens(b"cat", 12), [1, 2]]).astype(np.int32)
    cache, _ = kv.allocate(cache, [0], [14], tokens=padded([tokens], WIDTH), items=[[[0, 12], [0, 0]]])
    cache, _ = kv.extend(cache, [14], max_new=WIDTH, seq_ids=[0], tokens=padded([tokens], WIDTH))
    cache, _ = kv.commit(cache, [0])
    small = np.concatenate([kv.item_tokens(b"cat", 4), [1, 2]]).astype(np.int32)
    found = kv.lookup(
        cache, padded([small, tokens], WIDTH), [6, 14], items=[[[0, 4], [0, 0]], [[0, 12], [0, 0]]]
    )
    assert found.tolist() == [0, 12]


def test_items_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"items has shape \(2, 2\), expected \(1, any, 2\)"):
        kv.allocate(kv.init(CONFIG), [0], [5], tokens=[[1] * 5], items=ITEMS)
