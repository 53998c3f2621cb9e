"""Answers after reasoning that the history drops: kept as chunks, and composed at their new places.

A chat template leaves the reasoning of earlier turns out of the history, so the next prompt parts from what
the cache has where the reasoning began, and the answer after it would be computed again. Instead, a row that
ends stores its answer as a chunk: keys and values computed after the reasoning, at their places there. The
next prompt has it composed at its new place, and some of its tokens computed again.

What hangs on a composed answer is no longer what the tokens alone decide. It is published all the same, or
each turn would compute all turns after the first answer: in a namespace that only such requests share.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder, set_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.chunks.chunk_reuse import Span, prompt_spans, request_spans
from kvcache_jax.chunks.chunk_store import chunks_of, with_chunks
from kvcache_jax.chunks.prompt_parts import ChunkParts, keep_span, refuse_windows
from kvcache_jax.chunks.prompts import ChunkRows, Prompts, chunk_name, store_donated
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.status import Status
from kvcache_jax.core.token_arguments import host_tokens
from kvcache_jax.decoding.prompt_parts import NO_PART
from kvcache_jax.decoding.prompts import PromptCall
from kvcache_jax.operations.rows import on_control
from kvcache_jax.prefix.names import namespace, namespace_within

_SHARED = namespace(weights="kvcache_jax: after composed answers")


def answers_namespace(words: np.ndarray) -> np.ndarray:
    """Finds the namespace u32[4] in which requests of a namespace share what hangs on composed answers."""
    return namespace_within(_SHARED, np.asarray(words))


def find_answer(
    tokens: Any, prompt_len: Any, length: Any, after: tuple[int, ...], numpy: Any = jnp
) -> tuple[Any, Any]:
    """Finds the answers in texts i32[n, P]: after the last `after` that was generated, as far as `length`.

    Returns their first places i32[n], and their tokens i32[n], 0 where there is none.
    """
    places, is_mark = numpy.arange(tokens.shape[1], dtype=np.int32)[None], True
    for i, token in enumerate(after):
        is_mark = is_mark & (numpy.roll(tokens, -i, axis=1) == token)
    ends = places + len(after)
    is_mark = is_mark & (places >= prompt_len[:, None]) & (ends <= length[:, None])
    first = numpy.max(numpy.where(is_mark, ends, 0), axis=1)
    return first, numpy.where(first > 0, length - first, 0)


def settle_rows(
    control: Control, rows: jax.Array, ids: jax.Array, tokens: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Takes what `rows` i32[n] were composed of for computed: they publish, and store, what they hold.

    Args:
      control: The state.
      rows: Rows; `max_seqs` is skipped.
      ids: i32[n, K], the chunks. That was no use of them: what is published is worth no more as a chunk.
      tokens: i32[n, max_seq_len], the rows' texts.
      config: The cache's.
    """
    chunks = chunks_of(control)
    first = get_at(chunks.first_composed, rows, 0)[:, None]
    if (index := control.prefix_index) is not None:
        nowhere, block_size = index.block_tokens.shape
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        is_new = (
            (first > 0) & (places >= first - 1) & (places < get_at(control.context_len, rows, 0)[:, None])
        )
        table = control.block_pools[config.indexed_group].block_table
        blocks = get_at(table, (rows[:, None], quotient(places, block_size)), nowhere)
        offsets = jnp.broadcast_to(remainder(places, block_size), blocks.shape)
        at = jnp.where(is_new, blocks, nowhere), offsets
        index = dataclasses.replace(index, block_tokens=set_at(index.block_tokens, at, tokens))
    used = jnp.where((rows < control.max_seqs)[:, None], ids, chunks.num_chunks)
    chunks = dataclasses.replace(
        chunks,
        first_composed=set_at(chunks.first_composed, rows, jnp.zeros_like(rows)),
        num_uses=chunks.num_uses.at[used].subtract(jnp.uint32(1), mode="drop"),
    )
    return with_chunks(control, chunks, prefix_index=index), rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerParts(ChunkParts):
    """Answers that stay as reasoning goes: `kv.engine.Inputs(parts=kv.chunks.AnswerParts(...))`.

    A request takes part by an input "parts", `GenerationRequest(prompt, 99, inputs={"parts": spans})`: where
    the answers to requests before stand in its prompt, or `[]` for a first turn. When it ends, its own answer
    is kept in the cache's `Store` by its tokens, the last one excepted, which no row held; of a longer one
    the first `max_chunk_len`. A request that names an answer has it composed, and all but `reuse.share` of it
    is not computed. One that is not kept, for it was given up or said otherwise, is computed as other text.

    This is approximate: keys and values were computed after the reasoning. So these requests share blocks
    with their like alone, in the namespace `answers.namespace(engine.namespace_of(...))`: `scrub` that, too.

    Attributes:
      after: Tokens that stand between reasoning and answer, such as `[THINK_END]`, or with the line break
        after it if the template drops that, too. Without them nothing is kept: the history drops nothing.
      least_len: Fewest tokens of an answer that is kept. Short ones cost little, and are found by what other
        conversations of the namespace said in the same words.

    Raises:
      ValueError, TypeError: no tokens, or as `Parts`.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> answers = kv.chunks.AnswerParts(reuse=kv.chunks.Reuse(rotate=rotate), after=[17])
      >>> inputs = kv.engine.Inputs(parts=answers)
    """

    keeps_ends: ClassVar[bool] = True

    after: Sequence[int]
    least_len: int = 16

    def __post_init__(self):
        super().__post_init__()
        _check(self)

    def check(self, config: CacheConfig) -> None:
        """Refuses a cache without a store, or with windows."""
        super().check(config)
        refuse_windows("the engine's requests have answers", config)

    def spans(
        self, prompt: np.ndarray, parts: Sequence[Span], num_tokens: int, config: CacheConfig
    ) -> list[Span]:
        """Checks the answers that a request names, and returns what is kept of them."""
        return request_spans(prompt, parts, num_tokens, config, self.least_len)

    def namespace(self, words: np.ndarray) -> np.ndarray:
        """Finds the namespace in which requests of a namespace u32[4] share what they hold."""
        return answers_namespace(words)

    def keep_end(
        self,
        cache: Cache,
        row: jax.Array,
        tokens: jax.Array,
        prompt_len: jax.Array,
        length: jax.Array,
        kept: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """Stores the answer of a row; its reasoning is published nowhere, for the history drops it."""
        first, num_tokens = find_answer(tokens, prompt_len, length, tuple(self.after))
        most = self.max_len(cache.config)
        published = jnp.where(first > 0, prompt_len, length)
        num_tokens = jnp.where(num_tokens < self.least_len, 0, jnp.minimum(num_tokens, most))
        places = jnp.arange(most, dtype=jnp.int32)[None]
        name = get_at(tokens, (jnp.zeros_like(row)[:, None], first[:, None] + places), 0)
        name = jnp.where(places < num_tokens[:, None], name, 0)
        is_there = self.find(cache.control, name, num_tokens, get_at(cache.control.namespace, row)) != NO_PART
        return keep_span(cache, row, first, jnp.where(is_there, 0, num_tokens), name, kept), published

    def put(
        self, cache: Cache, row: jax.Array, ids: jax.Array, starts: jax.Array, tokens: jax.Array
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Composes a row, which then publishes all that it holds."""
        cache, is_put, is_again = super().put(cache, row, ids, starts, tokens)
        ids = jnp.where(ids == NO_PART, chunks_of(cache.control).num_chunks, ids)
        rows = jnp.where(is_put, row, cache.max_seqs)
        control, _ = settle_rows(cache.control, rows, ids, tokens, config=cache.config)
        return dataclasses.replace(cache, control=control), is_put, is_again


class AnswerRows(ChunkRows):
    """A call's prompts that have kept answers; those that are not kept are left to ordinary prefill."""

    def __init__(self, call: PromptCall, spans: list[list[Span]], answers: "Answers"):
        super().__init__(call, spans, answers.reuse)
        self.answers = answers

    def prefix_len(self, prompt_id: int) -> int:
        """Counts the tokens of a prompt, all of which its row publishes."""
        return len(self.call.tokens[prompt_id])

    def hold(self, cache: Cache, prompt_id: int, row: int) -> tuple[Cache, list[int]]:
        """Finds a prompt's answers; `num_chunks` for one that is not kept."""
        prompt, words = self.call.tokens[prompt_id], self.call.namespaces[prompt_id]
        found = [self._find(cache, prompt[start:end], words) for start, end in self.spans[prompt_id]]
        nowhere = chunks_of(cache.control).num_chunks
        return cache, [nowhere if chunk_id is None else chunk_id for chunk_id in found]

    def fill(self, cache: Cache, prompt_id: int, row: int, parts: Sequence[int]) -> Cache:
        """Composes the answers that the prefix cache does not have, and settles the row."""
        num_cached, nowhere = int(cache.context_len[row]), chunks_of(cache.control).num_chunks
        spans = self.spans[prompt_id]
        parts = [part if span[0] >= num_cached else nowhere for part, span in zip(parts, spans, strict=True)]
        cache = super().fill(cache, prompt_id, row, parts)
        ids = self._placed(cache, prompt_id, parts).chunk_ids
        tokens = np.zeros((1, cache.config.max_seq_len), np.int32)
        tokens[0, : len(self.call.tokens[prompt_id])] = self.call.tokens[prompt_id]
        return on_control(settle_rows, cache, np.array([row], np.int32), ids, tokens)[0]

    def keep_end(self, cache: Cache, prompt_id: int, row: int, tokens: Sequence[int]) -> tuple[Cache, int]:
        """Stores the answer of a row; its reasoning is published nowhere, for the history drops it."""
        prompt = self.call.tokens[prompt_id]
        text = np.append(prompt, np.array(tokens[:-1], np.int32))[None]
        (first,), (num,) = find_answer(
            text, np.array([len(prompt)]), np.array([text.shape[1]]), tuple(self.answers.after), np
        )
        published = len(prompt) if first > 0 else text.shape[1]
        num = min(int(num), chunks_of(cache.control).tokens.shape[1])
        if num < self.answers.least_len:
            return cache, published
        name = chunk_name(cache, text[0, first : first + num])

        def store(cache: Cache) -> tuple[Cache, bool | None]:
            cache, stored = store_donated(cache, np.array([row]), np.array([first]), np.array([num]), name)
            return cache, int(stored.status[0]) == Status.OK or None

        return self.with_room(cache, store)[0], published


@dataclasses.dataclass(frozen=True)
class Answers(Prompts):
    """Prompts with answers that stay as reasoning goes: the `prompts` of `generate`; see `AnswerParts`.

    Each continuation's answer is kept in the cache's `Store`; hand `GenerateResult.cache` on to the call for
    the next turn, whose prompts name its place.

    Attributes:
      tokens: Token ids of each prompt.
      spans: For each prompt the pairs `(start, end)` of answers in it; `[]` for a first turn.
      reuse: Says how answers are composed, and how much of them is computed again.
      after: Tokens that stand between reasoning and answer.
      least_len: Fewest tokens of an answer that is kept.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> first_turn = kv.chunks.Answers([range(40)], [[]], kv.chunks.Reuse(rotate=rotate), after=[17])
    """

    after: Sequence[int] = ()
    least_len: int = 16

    def __post_init__(self):
        _check(self)

    def namespaces(self, words: np.ndarray) -> np.ndarray:
        """Finds the namespaces in which these prompts share what they hold."""
        return np.stack([answers_namespace(of_prompt) for of_prompt in words])

    def rows(self, call: PromptCall) -> AnswerRows:
        """Checks the spans, and returns the prompts as rows are started for them.

        Raises:
          ValueError, TypeError: as for `Prompts`, layers with windows, or a call of `score`.
        """
        if call.caller != "generate":
            raise ValueError(
                f"{call.caller} got kv.chunks.Answers, expected kv.chunks.Prompts, or `generate`"
            )
        refuse_windows("generate got answers", call.config)
        return AnswerRows(call, prompt_spans(call, self.spans, self.reuse, self.least_len), self)


def _check(answers: AnswerParts | Answers) -> None:
    after = tuple(host_tokens("after", answers.after).tolist())
    if not after:
        raise ValueError("after is empty, expected the tokens between reasoning and answer")
    object.__setattr__(answers, "after", after)
    object.__setattr__(answers, "least_len", static_count("least_len", answers.least_len, 1, 2**30, "2**30"))
