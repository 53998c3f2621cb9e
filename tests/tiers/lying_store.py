"""Stores that do what stores must not do: by chance, or in every call."""

import numpy as np

import kvcache_jax as kv


class LyingStore:
    """A store in memory that loses, delays, reorders, repeats and spoils.

    Attributes:
      counts: How often it did each.
    """

    FAULTS = ("lose", "delay", "reorder", "repeat", "other key", "flip", "cut", "raise", "claim", "too few")

    def __init__(self, seed, rate=0.3):
        self.rng, self.rate = np.random.default_rng(seed), rate
        self.counts = dict.fromkeys(self.FAULTS, 0)
        self.inner, self.late = kv.tiers.MemoryStore(), []

    def chance(self, *faults):
        """One of the faults, or None."""
        if self.rng.random() > self.rate:
            return None
        fault = faults[int(self.rng.integers(len(faults)))]
        self.counts[fault] += 1
        return fault

    def contains(self, keys):
        fault = self.chance("claim", "raise", "too few")
        if fault == "raise":
            raise ConnectionError("down")
        if fault == "claim":
            return [bool(self.rng.integers(2)) for _ in keys]
        return self.inner.contains(keys)[: -1 if fault else None]

    def get(self, keys):
        self.arrive()
        fault = self.chance("reorder", "repeat", "other key", "flip", "cut", "raise", "too few")
        if fault == "raise":
            raise TimeoutError("slow")
        values = self.inner.get(keys)
        if fault == "reorder":
            return [values[i] for i in self.rng.permutation(len(values))]
        if fault == "repeat":
            return [values[0]] * len(values)
        if fault == "too few":
            return values[:-1]
        return [value and self.spoilt(value, fault) for value in values]

    def spoilt(self, value, fault):
        if fault is None or self.rng.random() < 0.5:
            return value
        place = int(self.rng.integers(len(value)))
        if fault == "other key":
            known = [*self.inner._values.values()]
            return known[int(self.rng.integers(len(known)))]
        if fault == "cut":
            return value[:place]
        return value[:place] + bytes([value[place] ^ (1 << int(self.rng.integers(8)))]) + value[place + 1 :]

    def put(self, items):
        fault = self.chance("lose", "delay", "raise")
        if fault == "raise":
            self.inner.put(items[: len(items) // 2])
            raise OSError(28, "No space left on device")
        if fault == "delay":
            self.late.append(items)
        elif fault is None:
            self.inner.put(items)

    def remove(self, keys):
        self.inner.remove(keys)

    def arrive(self):
        while self.late and self.rng.random() < 0.5:
            self.inner.put(self.late.pop(int(self.rng.integers(len(self.late)))))


class FailingStore(kv.tiers.MemoryStore):
    """A store that is down, has no room, or gives no bytes."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def put(self, items):
        if "put" in self.calls:
            raise OSError(28, "No space left on device")
        super().put(items)

    def get(self, keys):
        if "get" in self.calls:
            raise ConnectionError("connection refused")
        return [2**40, "text", [b"x"]][: len(keys)] if "no bytes" in self.calls else super().get(keys)

    def contains(self, keys):
        if "contains" in self.calls:
            raise TimeoutError("timed out")
        return super().contains(keys)
