"""The value by which a feature puts the prompts of an engine's requests together, within its program.

An engine takes one value and names no feature. The class here has no parts: every token that is not cached is
computed. A feature's own subclass has some.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control

NO_PART = -1
"""The id of none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptParts:
    """Parts of requests' prompts: none. Static: the engine's program goes by it.

    A part is a span of a prompt that is computed alone, as the beginning of a row, and that the cache keeps
    under an id. Of a prompt with parts the tokens before the first one are computed, then all parts are put
    into the row, and what they say is to be computed again is, with the text between them. A kept part takes
    at most as many blocks as its row did.

    Where it `keeps_ends`, none is computed alone: parts are what ended requests left, and one that is not
    kept is other text. Rows then publish their prompts, and when they end what `keep_end` says, in a
    namespace that only such requests share.

    Attributes:
      max_parts: Most parts of one prompt.
    """

    keeps_ends: ClassVar[bool] = False

    max_parts: int = 0

    def check(self, config: CacheConfig) -> None:
        """Refuses a cache that keeps no parts: got, expected and the fix."""

    def spans(
        self, prompt: np.ndarray, parts: Sequence[tuple[int, int]], num_tokens: int, config: CacheConfig
    ) -> list[tuple[int, int]]:
        """Checks the parts that a request names, on the host.

        Args:
          prompt: i32[any].
          parts: First place and end of each.
          num_tokens: Most tokens that its row comes to hold.
          config: The cache's.

        Returns:
          The parts in order, without those that the cache has no room for beside the row and the others,
          whatever it holds: they are computed as other text is.

        Raises:
          ValueError: parts that overlap, or are too long.
        """
        return []

    def max_len(self, config: CacheConfig) -> int:
        """Counts the most tokens of a part."""
        return 0

    def find(self, control: Control, tokens: jax.Array, length: jax.Array, namespace: jax.Array) -> jax.Array:
        """Finds kept parts, i32[n]; `NO_PART` where none is kept.

        Args:
          control: The state.
          tokens: i32[n, max_len], 0 after the last one.
          length: i32[n].
          namespace: u32[n, 4].
        """
        return length * 0 + NO_PART

    def give_up(self, cache: Cache, num_blocks: jax.Array, kept: jax.Array) -> Cache:
        """Gives up parts until `num_blocks` i32[groups] are free or cached; none if that would not do.

        Those in `kept` i32[any] stay.
        """
        return cache

    def keep(
        self, cache: Cache, row: jax.Array, tokens: jax.Array, length: jax.Array, kept: jax.Array
    ) -> Cache:
        """Keeps the first tokens of a row as a part, for which others than `kept` are given up.

        Args:
          cache: The cache.
          row: i32[1].
          tokens: i32[1, max_len], 0 after the last one.
          length: i32[1]. For 0, and without room, nothing is kept.
          kept: i32[any], ids.
        """
        return cache

    def namespace(self, words: np.ndarray) -> np.ndarray:
        """Finds the namespace u32[4] of requests that name parts, or none of them, within their own."""
        return words

    def keep_end(
        self,
        cache: Cache,
        row: jax.Array,
        tokens: jax.Array,
        prompt_len: jax.Array,
        length: jax.Array,
        kept: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """Keeps what the next request may name of a row whose request has ended.

        Args:
          cache: The cache.
          row: i32[1].
          tokens: i32[1, max_seq_len], arbitrary after the first `length`.
          prompt_len: i32[1], the first ones that are its prompt's.
          length: i32[1], tokens of the request that the row holds: all but its last.
          kept: i32[any], ids that are not given up.

        Returns:
          The cache, and i32[1], the row's first tokens that the next request may begin with.
        """
        return cache, length

    def put(
        self, cache: Cache, row: jax.Array, ids: jax.Array, starts: jax.Array, tokens: jax.Array
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Puts parts `ids` i32[1, max_parts] into a row i32[1], from places `starts` i32[1, max_parts] on.

        `tokens` i32[1, max_seq_len] are the request's. Returns the cache; whether they are there, bool[],
        else nothing changed; and their places that are to be computed again, bool[max_seq_len].
        """
        return cache, row[0] < 0, jnp.zeros(cache.config.max_seq_len, bool)


NO_PARTS = PromptParts()
"""Prompts have none."""
