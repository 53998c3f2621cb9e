"""Quantised caches with a host tier and a store: they say what the same cache says without them."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing

VOCAB, HEADS, DIM, NEW = 40, 2, 8, 3
WIDTH = HEADS * DIM
TEXTS = np.random.default_rng(5).integers(0, VOCAB, (4, 28))
TEXTS[1:3, :12] = TEXTS[0, :12]
TEXTS[3, :6] = TEXTS[0, :6]


def make_params():
    """Weights whose products round, and whose logits are close to each other."""
    rng = np.random.default_rng(7)
    shapes = {"embedding": (VOCAB, WIDTH), "qkv": (2, WIDTH, 3 * WIDTH), "out": (2, WIDTH, WIDTH)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def forward(params, tokens, cache, step):
    x = params["embedding"][tokens] + jnp.sin(step.positions[..., None].astype(jnp.float32))
    for layer in range(2):
        parts = jnp.split(x @ params["qkv"][layer], 3, axis=-1)
        q, k, v = (part.reshape(*tokens.shape, HEADS, DIM) for part in parts)
        cache, seen = kv.attention(cache, layer, q, k, v, step)
        x = x + seen.reshape(x.shape) @ params["out"][layer]
    return x @ params["embedding"].T, cache


PARAMS = make_params()
FULL = kv.FullAttention(HEADS, DIM)
WINDOW = kv.SlidingWindow(HEADS, DIM, window=9, num_blocks=20)
CASES = {
    "int8": [kv.Quantised(FULL, "int8")] * 2,
    "int4": [kv.Quantised(FULL, "int4", rotate=True)] * 2,
    "int4 windows": [kv.Quantised(WINDOW, "int4"), kv.Quantised(FULL, "int8")],
    "fp8": [kv.Quantised(FULL, "fp8")] * 2,
}


def config_of(layers, **options):
    sizes = dict(num_blocks=18, block_size=4, max_seqs=2, max_seq_len=32)
    return kv.CacheConfig(layers, **sizes | options)


def say(config, prompts, cache=None):
    return kv.generate(forward, PARAMS, prompts, config, max_new_tokens=NEW, prefill_len=32, cache=cache)


def alone(config, prompt):
    """What a new cache says after a prompt."""
    return list(say(config, [prompt, (0,)]).generations[0].tokens)


class TierScript:
    """A cache with tiers, whose answers are compared with the answers of a cache that nothing was in."""

    def __init__(self, layers, seed):
        self.rng, self.store = np.random.default_rng(seed), kv.tiers.MemoryStore()
        self.alone = config_of(layers)
        host = [kv.tiers.Host(num_blocks=24)]
        self.cache = testing.poison(kv.init(config_of(layers, enable_prefix_caching=True, extras=host)))
        self.known, self.counts = {}, dict.fromkeys(("cached", "promoted", "loaded"), 0)

    def prompt(self):
        """The beginning of a known text, with another end in some cases."""
        text = self.rng.choice(TEXTS)[: int(self.rng.integers(1, 29))].tolist()
        kept = int(self.rng.integers(len(text))) if self.rng.random() < 0.3 else len(text)
        return tuple([*text[:kept], *self.rng.integers(0, VOCAB, len(text) - kept).tolist()])

    def _ask(self):
        prompts, before = [self.prompt(), self.prompt()], kv.tiers.host_stats(self.cache).num_promoted
        before = int(before)
        result = say(self.cache.config, prompts, self.cache)
        self.cache = result.cache
        for prompt, said in zip(prompts, result.generations, strict=True):
            if prompt not in self.known:
                self.known[prompt] = alone(self.alone, prompt)
            assert list(said.tokens) == self.known[prompt], prompt
        self.counts["cached"] += result.num_cached_tokens
        self.counts["promoted"] += int(kv.tiers.host_stats(self.cache).num_promoted) - before

    def _save(self):
        assert not kv.tiers.save(self.cache, self.store, weights="w").reasons

    def _load(self):
        self.cache, report = kv.tiers.load(self.store, self.cache, weights="w")
        self.counts["loaded"] += report.num_loaded

    def _restart(self):
        self._save()
        self.cache = testing.poison(kv.init(self.cache.config))
        self._load()

    def _fetch(self):
        self.cache, report = kv.tiers.load(self.store, self.cache, weights="w", prompts=[self.prompt()])
        self.counts["loaded"] += report.num_loaded

    def _demote(self):
        self.cache, _ = kv.tiers.demote_to_utilization(self.cache, float(self.rng.choice([0.0, 0.3, 0.6])))

    def _forget(self):
        self.cache, _ = kv.reset_prefix_cache(self.cache)

    def run(self, num_operations):
        names = ["ask"] * 12 + ["save", "fetch", "demote", "demote"] + ["restart", "forget"]
        for name in self.rng.choice(names, num_operations):
            getattr(self, f"_{name}")()
            assert kv.check_invariants(self.cache) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_quantised_cache_says_the_same_with_tiers_and_without(case):
    """300 operations; a cache in full precision says something else."""
    script = TierScript(CASES[case], seed=sorted(CASES).index(case))
    script.run(300)
    assert min(script.counts.values()) > 20, script.counts
    some, full = [*script.known.items()][:40], config_of([FULL] * 2)
    assert any(alone(full, prompt) != tokens for prompt, tokens in some)
