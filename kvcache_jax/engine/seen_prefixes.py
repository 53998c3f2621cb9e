"""The beginnings of prompts that a shard of a mesh was sent: those that come again go there again."""

import collections
from collections.abc import Iterator

import numpy as np

from kvcache_jax.core.config import CacheConfig


class SeenPrefixes:
    """The blocks of prompts that a shard may have in its cache: as many as fit, those sent last.

    A guess that costs nothing on the device: the shard's index decides what a prompt finds.

    Args:
      config: The shard's.
    """

    def __init__(self, config: CacheConfig):
        group = config.groups[config.indexed_group]
        self._block_size, self._most = group.block_size, config.enable_prefix_caching * group.num_blocks
        self._names: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, namespace: np.ndarray, prompt: np.ndarray) -> None:
        """Notes a prompt i32[n] of a namespace u32[4]."""
        for name in [*self._names_of(namespace, prompt)][::-1]:  # a block goes before those that it follows
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def num_tokens(self, namespace: np.ndarray, prompt: np.ndarray) -> int:
        """Counts the tokens at the beginning of a prompt i32[n] that may be there."""
        num_blocks = 0
        for name in self._names_of(namespace, prompt):
            if name not in self._names:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def clear(self) -> None:
        """Forgets all."""
        self._names.clear()

    def _names_of(self, namespace: np.ndarray, prompt: np.ndarray) -> Iterator[int]:
        """Yields a number for each whole block before the last token, of all tokens up to the block's end."""
        name, size = hash(namespace.tobytes()), self._block_size
        for start in range(0, (len(prompt) - 1) // size * size, size):
            yield (name := hash((name, prompt[start : start + size].tobytes())))
