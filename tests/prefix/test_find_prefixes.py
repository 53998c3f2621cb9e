"""Prompts that are looked up some blocks at a time, as long ones are on CPUs, against their tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from kvcache_jax.operations.allocate import Prompts, find_hits
from kvcache_jax.prefix import prefix_index

BLOCK, LONGEST = 4, 44
CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 4)],
    num_blocks=60,
    block_size=BLOCK,
    max_seqs=4,
    max_seq_len=LONGEST,
    enable_prefix_caching=True,
)


@pytest.fixture(scope="module")
def published():
    """A cache of four texts, two of which begin alike, and the texts."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 3, (4, LONGEST))
    texts[1, :23] = texts[0, :23]
    lengths = [44, 41, 17, 3]
    cache, _ = kv.allocate(kv.init(CONFIG), range(4), lengths, tokens=texts)
    cache, _ = kv.extend(cache, lengths, max_new=LONGEST, tokens=texts)
    cache, _ = kv.commit(cache, range(4))
    return cache, [text[:length] for text, length in zip(texts, lengths, strict=True)]


def some_prompts(texts, seed):
    """i32[6, LONGEST] and lengths: beginnings of texts, that go on as they like."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, 3, (6, LONGEST)).astype(np.int32)
    for prompt in prompts:
        text = texts[rng.integers(4)]
        num = rng.integers(len(text) + 1)
        prompt[:num] = text[:num]
    return prompts, rng.integers(0, LONGEST + 1, 6).astype(np.int32)


def expected_of(texts, prompt, length):
    """Tokens of whole blocks that a text has too, fewer than the prompt's."""
    most = max(length - 1, 0)
    common = [np.cumprod(text[:most] == prompt[:most][: len(text)]).sum() for text in texts]
    return max(common) // BLOCK * BLOCK


def found_in(cache, prompts, lengths):
    words, zeros = jnp.zeros((len(lengths), 4), jnp.uint32), jnp.zeros_like(lengths)
    asked = Prompts(lengths, words, zeros, prompts, jnp.ones_like(lengths, bool), None)
    return find_hits(cache.control, asked, cache.config).num_tokens


def on_two_devices(cache, prompts, lengths):
    mesh, by_row = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,)), P("rows")
    spread = jax.shard_map(found_in, mesh=mesh, in_specs=(P(), by_row, by_row), out_specs=by_row)
    return spread(cache, prompts, lengths)


def of_two_caches(cache, prompts, lengths):
    """The same prompts in another order, in a cache beside."""
    caches, order = jax.tree.map(lambda x: jnp.stack([x, x]), cache), jnp.arange(5, -1, -1)
    asked = (jnp.stack([x, x[order]]) for x in (prompts, lengths))
    first, second = jax.vmap(found_in)(caches, *asked)
    return jnp.where(first == second[order], first, -1)


@pytest.mark.quick_cases("found_in-4", "on_two_devices-8", "of_two_caches-12")
@pytest.mark.parametrize(
    ("run", "num_tokens"),
    [(found_in, BLOCK), (found_in, 3 * BLOCK), (found_in, 256), (on_two_devices, 8), (of_two_caches, 12)],
)
def test_hits_are_the_same_however_many_blocks_are_looked_at_at_once(monkeypatch, published, run, num_tokens):
    monkeypatch.setattr(prefix_index, "_TOKENS_ON_CPUS", num_tokens)
    cache, texts = published
    find, num_found = jax.jit(lambda *arguments: run(*arguments)), 0
    for seed in range(8):
        prompts, lengths = some_prompts(texts, seed)
        found = find(cache, jnp.asarray(prompts), jnp.asarray(lengths)).tolist()
        assert found == [expected_of(texts, *pair) for pair in zip(prompts, lengths, strict=True)]
        num_found += sum(found)
    assert num_found > 200


def test_a_prompt_longer_than_its_tokens_takes_no_hits_of_others(monkeypatch, published):
    monkeypatch.setattr(prefix_index, "_TOKENS_ON_CPUS", 3 * BLOCK)
    cache, texts = published
    both = jnp.asarray([texts[0][:36]] * 2, jnp.int32)
    found = jax.jit(lambda *arguments: found_in(*arguments))(cache, both, jnp.array([36, 99], jnp.int32))
    assert found[0] == 32


def test_a_cache_on_explicit_axes_is_asked_where_no_mesh_is_set(monkeypatch, published):
    monkeypatch.setattr(prefix_index, "_TOKENS_ON_CPUS", 3 * BLOCK)
    cache, texts = published
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    prompts, lengths = some_prompts(texts, 0)
    find, refused = jax.jit(lambda *arguments: found_in(*arguments)), None
    try:
        found = find(jax.device_put(cache, NamedSharding(mesh, P())), prompts, lengths).tolist()
    except Exception as error:  # jax's, which has no public name
        refused = error
    assert refused is None
    assert found == [expected_of(texts, *pair) for pair in zip(prompts, lengths, strict=True)]
