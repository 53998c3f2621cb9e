"""A feature's own prompts and retention, whose answers are checked before a loop goes by them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.same_form import form_of
from kvcache_jax.core.arguments import namespace_words
from kvcache_jax.core.cache_checks import same_cache
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.decoding.prompts import KEEP_ALL, PromptCall, PromptRows, PromptSource, Retention
from kvcache_jax.layers.span import Span


def namespaces_within(prompts: PromptSource, words: np.ndarray) -> np.ndarray:
    """Asks a source for its prompts' namespaces u32[prompts, 4] within the call's."""
    found = prompts.namespaces(words)
    if form_of(found) != form_of(words):
        raise TypeError(
            f"{type(prompts).__name__}.namespaces() returned {form_of(found)}, expected {form_of(words)}, "
            "one of each prompt: make them with kvcache_jax.namespace"
        )
    return np.asarray(namespace_words(found, len(words)))


class CheckedRows:
    """The `PromptRows` of a call's source."""

    def __init__(self, prompts: PromptSource, call: PromptCall):
        self._rows = _of_type(f"{type(prompts).__name__}.rows()", prompts.rows(call), PromptRows)
        self._call, self._name = call, type(self._rows).__name__

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens that were reused, and those that were stored."""
        return self._rows.num_reused_tokens, self._rows.num_stored_tokens

    def prefix_len(self, prompt_id: int) -> int:
        """Counts the first tokens of a prompt that its row publishes, and finds."""
        most, what = len(self._call.tokens[prompt_id]), f"{self._name}.prefix_len({prompt_id})"
        return static_count(what, self._rows.prefix_len(prompt_id), 0, most, "the prompt's tokens")

    def hold(
        self, cache: Cache, prompt_id: int, row: int, may_wait: bool
    ) -> tuple[Cache, Sequence[int] | None]:
        """Makes the parts of a prompt; None only if it `may_wait`, for rows that hold blocks."""
        what = f"{self._name}.hold()"
        found, parts = self._pair(what, self._rows.hold(cache, prompt_id, row), cache, "parts")
        if parts is None and not may_wait:
            raise ValueError(
                f"{what} returned None for prompt {prompt_id}, and there is no row to wait for, expected its "
                "parts, without those that find no room"
            )
        return found, parts

    def with_room[T](
        self, cache: Cache, attempt: Callable[[Cache], tuple[Cache, T | None]], kept: Sequence[int]
    ) -> tuple[Cache, T | None]:
        """Tries a call that may lack blocks, and again while extras have room to give."""
        return self._pair(
            f"{self._name}.with_room()", self._rows.with_room(cache, attempt, kept), cache, "a result"
        )

    def make_room(self, cache: Cache, is_enough: Callable[[Cache], bool], kept: Sequence[int] = ()) -> Cache:
        """Frees blocks that extras hold until the cache `is_enough`."""
        return same_cache(f"{self._name}.make_room()", self._rows.make_room(cache, is_enough, kept), cache)

    def fill(self, cache: Cache, prompt_id: int, row: int, parts: Sequence[int]) -> Cache:
        """Fills a row as far as its parts reach."""
        found = self._rows.fill(cache, prompt_id, row, parts)
        if found is cache:
            return cache
        what, num_tokens = f"{self._name}.fill()", len(self._call.tokens[prompt_id])
        num_held = int(np.asarray(same_cache(what, found, cache).context_len)[row])
        if num_held >= num_tokens or not np.asarray(found.is_active)[row]:
            raise ValueError(
                f"{what} left {num_held} tokens in row {row}, of prompt {prompt_id}, expected fewer than its "
                f"{num_tokens}, in a row that was not freed: the last one is computed for its logits"
            )
        return found

    def keep_end(self, cache: Cache, prompt_id: int, row: int, tokens: Sequence[int]) -> tuple[Cache, int]:
        """Keeps what the next prompt may have of a row that ended; returns its tokens that are published."""
        what = f"{self._name}.keep_end()"
        found, most = self._pair(what, self._rows.keep_end(cache, prompt_id, row, tokens), cache, "a length")
        return found, static_count(what, most, 0, 2**31 - 1, "2**31 - 1")

    def _pair(self, what: str, found: Any, cache: Cache, second: str) -> tuple[Cache, Any]:
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"{what} returned {form_of(found)}, expected the cache and {second}")
        return same_cache(what, found[0], cache), found[1]


def check_retention(retention: Retention, caller: str, config: CacheConfig, num_drafts: int) -> None:
    """Refuses a retention that programs cannot go by, or that cannot keep the tokens of such a cache."""
    if not isinstance(retention, Retention):
        raise TypeError(
            f"retention is {retention!r}, expected {KEEP_ALL!r} or a feature's, a `Retention` too"
        )
    name = type(retention).__name__
    try:
        hash(retention)
    except TypeError as error:
        raise TypeError(
            f"retention is a {name} and cannot be hashed ({error}), expected a @dataclass(frozen=True) of "
            "values that can be"
        ) from None
    if (span := retention.span) is not None:
        _of_type(f"{name}.span", span, Span, "is")
    retention.check(caller, config, num_drafts)


def call_len(retention: Retention, config: CacheConfig, prefill_len: int) -> int:
    """Limits the prompt tokens in one call of the model as a retention says."""
    what = f"{type(retention).__name__}.prefill_len()"
    return static_count(what, retention.prefill_len(config, prefill_len), 1, prefill_len, "prefill_len")


def most_held(retention: Retention, config: CacheConfig, num_new: int) -> int | None:
    """Counts the most tokens that a row holds in a step of `num_new`; None for all of its text."""
    if (num_held := retention.max_held_len(config, num_new)) is None:
        return None
    return static_count(f"{type(retention).__name__}.max_held_len()", num_held, num_new)


def text_width(
    retention: Retention, config: CacheConfig, prompts: Sequence[np.ndarray], max_new_tokens: int
) -> int:
    """Counts the tokens of the longest text that a row may come to, with one more than its prompt."""
    what, least = f"{type(retention).__name__}.max_text_len()", max(map(len, prompts), default=0) + 1
    width = retention.max_text_len(config, prompts, max_new_tokens)
    return static_count(what, width, least, 2**31 - 1, "2**31 - 1")


def drop_unseen(retention: Retention, cache: Cache, rows: jax.Array) -> Cache:
    """Drops tokens that no later token of `rows` i32[n] sees."""
    what = f"{type(retention).__name__}.drop_unseen()"
    return same_cache(what, retention.drop_unseen(cache, rows), cache)


def _of_type[T](what: str, found: Any, expected: type[T], verb: str = "returned") -> T:
    if not isinstance(found, expected):
        raise TypeError(f"{what} {verb} {form_of(found)}, expected a {expected.__name__}")
    return found
