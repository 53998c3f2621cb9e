"""Random scripts with a host tier and a store: caches end and begin again, and the store lies."""

import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.window_script import NAMESPACES, ROWS
from tests.tiers.host_script import TEXT, HostScript
from tests.tiers.lying_store import LyingStore

ON_STORES = (*["save"] * 5, *["load"] * 2, *["fetch"] * 5, *["restart"] * 2, "retrain")


class StoreScript(HostScript):
    """A `HostScript` whose blocks are saved and loaded.

    Attributes:
      store: A store.
      version: Of the weights, on which keys and values depend.
      loaded: Blocks that were loaded.
      reasons: How many were dropped, by reason.
    """

    def __init__(self, seed, config, store=None):
        super().__init__(seed, config)
        self.store, self.version, self.loaded, self.reasons = store or LyingStore(seed, rate=0.12), 0, 0, {}

    def codes(self, tokens, space):
        """Also of the weights."""
        return super().codes([self.version, *tokens], space)[1:]

    def step(self):
        if self.rng.random() < 0.93:
            super().step()
            return
        name = str(self.rng.choice(ON_STORES))
        getattr(self, f"_{name}")()
        self.check(name)

    @property
    def weights(self):
        return f"version {self.version}"

    def namespace(self):
        """One of the namespaces, or none."""
        return [None, *NAMESPACES][int(self.rng.integers(1 + len(NAMESPACES)))]

    def note(self, report):
        self.loaded += report.num_loaded
        for reason, count in report.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        assert report.num_dropped == sum(report.reasons.values())

    def _save(self):
        self.note(kv.tiers.save(self.cache, self.store, weights=self.weights, namespace=self.namespace()))

    def _load(self):
        self.cache, report = kv.tiers.load(
            self.store, self.cache, weights=self.weights, namespace=self.namespace()
        )
        self.note(report)

    def _fetch(self):
        prompts, space = [self.text(TEXT), self.text(TEXT - 9)], int(self.rng.integers(len(NAMESPACES)))
        self.cache, report = kv.tiers.load(
            self.store, self.cache, weights=self.weights, namespace=NAMESPACES[space], prompts=prompts
        )
        self.note(report)

    def _restart(self):
        self._save()
        for row in [*self.rows]:
            self.end(row)
        self.cache = testing.poison(kv.init(self.cache.config))
        self._load()

    def _retrain(self):
        """What was saved with other weights is there, and never found."""
        self.version = int(self.rng.integers(3))
        for row in [*self.rows]:
            self.end(row)
        self.cache = testing.poison(kv.init(self.cache.config))
        self._load()

    def restart(self):
        """Restarts from a store that does not lie: what was found is found. Returns how many tokens."""
        self.cache, _ = kv.free(self.cache, [*range(ROWS)])
        for row in [*self.rows]:
            self.end(row)
        found = self.found_tokens()
        kv.tiers.save(self.cache, self.store, weights=self.weights)
        self.cache = testing.poison(kv.init(self.cache.config))
        self.cache, report = kv.tiers.load(self.store, self.cache, weights=self.weights)
        self.note(report)
        assert (self.found_tokens() >= found).all()
        return found.sum()

    def found_tokens(self):
        """The tokens of each known text that are found, by namespace."""
        cache = self.cache.config.keeper.settle(self.cache)
        tokens = np.array(self.texts)
        return np.array([kv.lookup(cache, tokens, [TEXT] * 4, words) for words in NAMESPACES])
