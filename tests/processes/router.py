"""A router by the events of one replica, and the same of the cache itself, both in texts."""

import collections

import numpy as np

from kvcache_jax.core.state import Cache
from kvcache_jax.processes import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher


class Router:
    """What a subscriber knows of one replica: by medium {hash: (hash before, tokens, namespace)}."""

    def __init__(self):
        self.blocks = {"GPU": {}, "CPU": {}}

    def apply(self, events):
        for event in events:
            match event:
                case BlockStored():
                    parent, size = event.parent_block_hash, event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    for i, name in enumerate(event.block_hashes):
                        assert parent is None or any(parent in blocks for blocks in self.blocks.values())
                        assert name not in self.blocks[event.medium], "stored twice"
                        tokens = event.token_ids[i * size : (i + 1) * size]
                        self.blocks[event.medium][name] = parent, tokens, event.namespace
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        assert name in self.blocks[event.medium], "removed and not there"
                        del self.blocks[event.medium][name]
                case AllBlocksCleared():
                    assert any(self.blocks.values())
                    self.blocks = {"GPU": {}, "CPU": {}}

    def texts(self):
        """All prefixes: (medium of the last block, namespace, tokens)."""
        known = self.blocks["GPU"] | self.blocks["CPU"]
        return sorted(
            (medium, namespace, self._text(known, name))
            for medium, blocks in self.blocks.items()
            for name, (_, _, namespace) in blocks.items()
        )

    def _text(self, known, name):
        parts = []
        while name is not None:
            assert name in known, "what a block follows is not there"
            name, tokens, _ = known[name]
            parts.append(tokens)
        return tuple(token for tokens in reversed(parts) for token in tokens)


def texts_of(cache):
    """The same of a cache, by walking from block to block."""
    index, g = cache.control.prefix_index, cache.config.indexed_group
    pool = cache.control.block_pools[g]
    parents, words = np.asarray(index.parent).tolist(), np.asarray(index.namespace)
    tokens, found, by_serial = np.asarray(index.block_tokens).tolist(), [], {}
    published = np.flatnonzero(np.asarray(pool.cached.is_published)).tolist()
    texts = {}

    def text(block):
        if block == pool.num_blocks:
            return ()
        return (*text(parents[block]), *tokens[block])

    def digits(row):
        return "".join(int(word).to_bytes(4, "little").hex() for word in row) if row.any() else ""

    for block in published:
        texts["GPU", block] = text(block)
        found.append(("GPU", digits(words[block]), texts["GPU", block]))
    tier = cache.control.extras.get("host")
    if tier is not None:
        serial = np.asarray(tier.serial)
        hosted = np.flatnonzero(np.asarray(tier.control.block_pools[g].cached.is_published))
        hosted = [int(block) for block in hosted if block < tier.num_blocks]
        for block in published:
            by_serial[int(serial[tier.num_blocks + block])] = texts["GPU", block]
        by_serial[0] = ()
        waiting = hosted
        while waiting:
            known = [b for b in waiting if int(tier.index.parent[b]) in by_serial]
            if not known:
                break  # what they follow was forgotten
            for b in known:
                texts["CPU", b] = (
                    *by_serial[int(tier.index.parent[b])],
                    *np.asarray(tier.index.block_tokens[b]).tolist(),
                )
                found.append(("CPU", digits(np.asarray(tier.index.namespace[b])), texts["CPU", b]))
                if serial[b]:
                    by_serial[int(serial[b])] = texts["CPU", b]
            waiting = [b for b in waiting if b not in known]
    return sorted(found)


class Told(EventPublisher):
    """A publisher for an engine on a mesh, whose events stay here: by shard a router that applies them."""

    def __init__(self):
        super().__init__("inproc://events")
        self.routers = collections.defaultdict(Router)
        self.num_removed = 0

    def publish(self, events, shard=0):
        self.routers[shard].apply(events)
        self.num_removed += sum(isinstance(event, BlockRemoved) for event in events)

    def check(self, engine):
        """Compares what routers know with the shards' indexes."""
        for shard, control in enumerate(engine._device.controls()):
            cache = Cache(control=control, pools=(), config=engine.config)
            assert self.routers[shard].texts() == texts_of(cache) != [], shard
