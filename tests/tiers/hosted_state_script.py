"""Random scripts on rows with states and a host tier."""

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax.tiers.hosted import capacity
from tests.support.state_script import MAX_LEN, StateScript

prefetch = jax.jit(kv.tiers.prefetch)


class HostedStateScript(StateScript):
    """A `StateScript` on a cache with a host tier.

    Attributes:
      num_restored: States and blocks of windows that came from the host.
      num_alone: Most that were there while their prefix was on the device.
    """

    operations = StateScript.operations | dict(prefetch=0.04, demote=0.03, scrub=0.006, forget=0.001)
    num_restored = num_alone = 0

    @property
    def tier(self):
        return self.cache.control.extras["host"]

    def waiting(self):
        pairs = zip(self.tier.sources, self.tier.control.block_pools, strict=True)
        counts = [int((sources < pool.num_blocks).sum()) for sources, pool in pairs]
        return sum(counts[g] for g in self.config.snapshot_groups)

    def allocate(self, row):
        before = self.waiting()
        super().allocate(row)
        self.num_restored += max(self.waiting() - before, 0)
        for g in self.config.snapshot_groups:
            links = self.tier.index.group_links[g]
            on_device = np.asarray(links.block_ids)[self.tier.num_blocks :]
            self.num_alone = max(self.num_alone, int((on_device < len(links.indexed_ids)).sum()))
            # What a prefix took along is no more than both tiers together have room for.
            pool, hosted = self.cache.control.block_pools[g], self.tier.control.block_pools[g].cached
            most = pool.num_blocks + capacity(self.config, self.config.keeper.num_blocks)[g]
            assert pool.num_blocks - int(pool.num_free) + int(hosted.num_cached) <= most

    def prefetch(self, _):
        tokens = np.array([self.texts[int(self.rng.integers(4))]], np.int32)
        length = int(self.rng.integers(MAX_LEN))
        found = int(kv.lookup(self.cache, tokens, [length])[0])
        self.cache, num_promoted = prefetch(self.cache, tokens, [length])
        assert int(num_promoted[0]) <= found

    def demote(self, _):
        target = float(self.rng.choice([0.0, 0.3, 0.8]))
        self.cache, _ = kv.tiers.demote_to_utilization(self.cache, target)

    def scrub(self, row):
        self.cache, _ = kv.scrub(self.cache, [row])
        self.rows.pop(row, None)
        self.pending.pop(row, None)

    def forget(self, _):
        self.cache, _ = kv.reset_prefix_cache(self.cache)
        for text in self.texts:
            assert not kv.lookup(self.cache, np.array([text]), [MAX_LEN]).any()
