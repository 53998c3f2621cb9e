"""The values by which features take part in the loops: how a prompt is put together, which tokens stay.

`generate` and `score` take a value of each, and name no feature. The classes here do nothing: every token of
a prompt is computed, and every token is kept. A feature's own subclass does more.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.decoding.forward import Forward
from kvcache_jax.layers.span import Span

# No id of a model's: tokens after a prompt's prefix are neither found nor published.
NOT_LOOKED_UP = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptCall:
    """The prompts of one call of `generate` or `score`.

    Attributes:
      caller: The function's name, for errors.
      forward: The model.
      params: Its parameters.
      config: The cache's.
      tokens: Of each prompt, i32[any].
      namespaces: u32[prompts, 4].
      prefill_len: Prompt tokens in one call of the model.
      retention: The tokens that rows keep.
    """

    caller: str
    forward: Forward
    params: Any
    config: CacheConfig
    tokens: Sequence[np.ndarray]
    namespaces: np.ndarray
    prefill_len: int
    retention: "Retention"


class PromptRows:
    """The prompts of a call while rows are started for them, on the host.

    Attributes:
      num_reused_tokens: Tokens of prompts that were put into rows and not computed, beside cached prefixes.
      num_stored_tokens: Tokens that were computed to be reused.
    """

    def __init__(self, call: PromptCall):
        self.call = call
        self.num_reused_tokens, self.num_stored_tokens = 0, 0

    def prefix_len(self, prompt_id: int) -> int:
        """Counts the first tokens of a prompt that its row publishes, and finds."""
        return len(self.call.tokens[prompt_id])

    def hold(self, cache: Cache, prompt_id: int, row: int) -> tuple[Cache, Sequence[int] | None]:
        """Makes the parts that a prompt is put together from.

        Args:
          cache: Donated.
          prompt_id: The prompt.
          row: An idle row, which is idle again afterwards.

        Returns:
          The cache, and ids of the parts; None in their place where other rows hold the blocks for them.
        """
        return cache, ()

    def with_room[T](
        self, cache: Cache, attempt: Callable[[Cache], tuple[Cache, T | None]], kept: Sequence[int] = ()
    ) -> tuple[Cache, T | None]:
        """Tries a call that may lack blocks, and again after each failure while extras have room to give.

        Args:
          cache: The cache.
          attempt: Returns the cache and a result, None for a failure.
          kept: Parts that are not given up.
        """
        cache, result = attempt(cache)
        while result is None:
            cache, is_less = cache.config.hooks.give_up(cache, kept)
            if not is_less:
                break
            cache, result = attempt(cache)
        return cache, result

    def make_room(self, cache: Cache, is_enough: Callable[[Cache], bool], kept: Sequence[int] = ()) -> Cache:
        """Frees blocks that extras hold, but for parts that are `kept`, until the cache `is_enough`."""
        if not cache.config.extras:
            return cache
        return self.with_room(cache, lambda cache: (cache, is_enough(cache) or None), kept)[0]

    def fill(self, cache: Cache, prompt_id: int, row: int, parts: Sequence[int]) -> Cache:
        """Fills a row that was allocated for a prompt as far as its parts reach, but not its last token.

        Args:
          cache: Donated.
          prompt_id: The prompt.
          row: Its row.
          parts: Of `hold`.
        """
        return cache

    def keep_end(self, cache: Cache, prompt_id: int, row: int, tokens: Sequence[int]) -> tuple[Cache, int]:
        """Keeps what the next prompt may have of a row that ended, and is freed next.

        Args:
          cache: Donated.
          prompt_id: The prompt.
          row: Its row, or one of its samples.
          tokens: The continuation, of which the row holds all but the last.

        Returns:
          The cache, and most of the row's first tokens that are published.
        """
        return cache, cache.config.max_seq_len


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Prompts of which every token that is not cached is computed.

    Attributes:
      tokens: Token ids of each prompt.
    """

    tokens: Sequence[Sequence[int]]

    def namespaces(self, words: np.ndarray) -> np.ndarray:
        """Finds the namespaces u32[prompts, 4] of the prompts' rows within their own."""
        return words

    def rows(self, call: PromptCall) -> PromptRows:
        """Checks a call's prompts, and returns them as rows are started for them.

        Raises:
          ValueError, TypeError: they cannot be put together so; names got, expected and the fix.
        """
        return PromptRows(call)


@dataclasses.dataclass(frozen=True)
class Retention:
    """The tokens that rows keep while they decode: all of them. Static: compiled programs go by it."""

    @property
    def span(self) -> Span | None:
        """The positions that a token sees, whatever its layer's kind; None for the kind's positions."""
        return None

    def check(self, caller: str, config: CacheConfig, num_drafts: int) -> None:
        """Refuses a cache whose rows cannot keep tokens so: got, expected and the fix."""

    def prefill_len(self, config: CacheConfig, prefill_len: int) -> int:
        """Limits the prompt tokens in one call of the model to those that a row has room for."""
        return prefill_len

    def max_held_len(self, config: CacheConfig, num_new: int) -> int | None:
        """Counts the most tokens that a row holds in a step of `num_new`; None for all of its text."""
        return None

    def max_text_len(self, config: CacheConfig, prompts: Sequence[np.ndarray], max_new_tokens: int) -> int:
        """Counts the tokens of the longest text that a row may come to."""
        return config.max_seq_len

    def drop_unseen(self, cache: Cache, rows: jax.Array) -> Cache:
        """Drops tokens that no later token of `rows` i32[n] sees; `max_seqs` is skipped."""
        return cache


KEEP_ALL = Retention()
"""Rows keep all tokens."""
