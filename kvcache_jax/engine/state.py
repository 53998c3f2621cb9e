"""The state of an engine from step to step: the cache, the requests, and the rows that they run in.

Invariants, between two steps:

* A running request has one row, and a row at most one running request (`row_request`).
* A running row holds fewer tokens in the cache than its request has: `context_len < length`. The last token
  that is known is never in the cache; computing it gives the logits of the next one. A row that computes a
  part of a prompt alone holds no more than that, and is freed when it has it; see `PartRows`.
* A row that is active without a running request has ended (`is_ended`), and is freed before the next step or
  the end of the dispatch.
* A request that waits holds no row and no block.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, num_true, rank_true, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.decoding.prompt_parts import NO_PART
from kvcache_jax.engine.part_rows import PartRows, empty_part_rows
from kvcache_jax.engine.requests import RequestArrays, TableSizes, empty_requests


class Phase(enum.IntEnum):
    """The place of a request."""

    EMPTY = 0
    """The slot was never used."""
    WAITING = 1
    """It holds nothing yet."""
    RUNNING = 2
    """It has a row."""
    PREEMPTED = 3
    """It had one, and waits for another."""
    DONE = 4
    """It ended; its slot can be used again."""


class Finish(enum.IntEnum):
    """The reason why a request ended."""

    NOT_YET = 0
    """It goes on."""
    STOP = 1
    """By a stop token, the last of its tokens."""
    LENGTH = 2
    """It has all its tokens."""
    NAN_LOGITS = 3
    """Of the logits after its tokens one is NaN or +inf."""
    REFUSED = 4
    """It could never run: more blocks than the pool has, or more tokens than `max_seq_len`."""
    CANCELLED = 5
    """By its caller."""
    DEADLINE = 6
    """Its time was over."""
    NO_TOKEN = 7
    """All logits after its tokens are -inf: the hook on logits banned every token."""


class EngineCounter(enum.IntEnum):
    """Index into `engine.State.counters`; events since the engine was made."""

    STEPS = 0
    """Steps of the loop."""
    PREFILL_STEPS = 1
    """Those that computed prompts beside the rows' next tokens."""
    PREFILL_TOKENS = 2
    """Tokens computed after which nothing was drawn."""
    GENERATED_TOKENS = 3
    """Tokens drawn."""
    CACHED_TOKENS = 4
    """Tokens that did not have to be computed, as they were found in the cache."""
    ADMISSIONS = 5
    """Requests that got a row, those that come back included, forks not."""
    FORKS = 6
    """Samples that got a row by a fork of their prompt's."""
    PREEMPTIONS = 7
    """Rows taken from requests for want of blocks."""
    STALLS = 8
    """Tokens that a row did not compute in a step for want of a block."""
    FINISHED = 9
    """Requests that ended, whatever the reason."""
    REFUSED = 10
    """Those among them that were refused."""
    DRAFTED = 11
    """Draft tokens proposed."""
    ACCEPTED = 12
    """Draft tokens accepted."""
    UPDATES = 13
    """Times that other weights came: of `set_params`, those that dispatches began with; each shard counts."""
    FIRST_TOKENS = 14
    """Requests that got their first token."""
    REUSED_TOKENS = 15
    """Tokens of parts that were put into rows, and not computed again."""


@pytree_dataclass()
class EngineState:
    """All that the engine's program reads and writes; donated from dispatch to dispatch.

    Attributes:
      cache: Cache.
      requests: RequestArrays, the table.
      phase: i32[R], each request's `Phase`.
      num_generated: i32[R], tokens after the prompt.
      num_preemptions: i32[R].
      num_bypassed: i32[R], later requests that were admitted before it.
      num_cached: i32[R], first tokens that the cache had when it was admitted; -1 if it has not been.
      row_request: i32[max_seqs], slot of the request that runs in the row; R for none.
      is_ended: bool[max_seqs], the row is to be freed.
      may_publish: bool[max_seqs], its blocks were computed under the present weights.
      may_admit: bool[], something changed since the last request did not fit.
      service: i32[clients], weighted tokens that each client got, above the least of clients with requests.
      outbox: i32[any, width], events since the last check-in; see `note_in_outbox`.
      outbox_len: i32[].
      counters: u32[len(EngineCounter)], modulo 2**32.
      parts: PartRows; None where no request has parts.
    """

    cache: Cache
    requests: RequestArrays
    phase: jax.Array
    num_generated: jax.Array
    num_preemptions: jax.Array
    num_bypassed: jax.Array
    num_cached: jax.Array
    row_request: jax.Array
    is_ended: jax.Array
    may_publish: jax.Array
    may_admit: jax.Array
    service: jax.Array
    outbox: jax.Array
    outbox_len: jax.Array
    counters: jax.Array
    parts: PartRows | None = None

    def with_control(self, control: Control, **fields: Any) -> "EngineState":
        """Sets the control state of the cache, and further fields."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, control=control), **fields)

    @property
    def length(self) -> jax.Array:
        """i32[R], tokens of each request that are known."""
        return self.requests.prompt_len + self.num_generated

    @property
    def is_running(self) -> jax.Array:
        """bool[max_seqs], the row has a request."""
        return self.row_request < self.requests.num_slots

    @property
    def row_start(self) -> jax.Array:
        """i32[max_seqs], place in the table's buffer of the first token that each row computes."""
        start = get_at(self.requests.start, self.row_request, 0)
        return start if self.parts is None else start + self.parts.alone[:, 0]

    @property
    def row_length(self) -> jax.Array:
        """i32[max_seqs], tokens that are known of each row's request, or of the part that it is for."""
        length = get_at(self.length, self.row_request, 0)
        return length if self.parts is None else jnp.where(self.is_alone, self.parts.alone_len, length)

    @property
    def is_alone(self) -> jax.Array:
        """bool[max_seqs], the row computes a part of a prompt alone, and draws nothing."""
        return self.is_running & False if self.parts is None else self.is_running & (self.parts.alone_len > 0)

    @property
    def kept_len(self) -> jax.Array:
        """i32[max_seqs], tokens of rows before those that windows still serve; none of a part alone."""
        context_len = self.cache.context_len
        return context_len if self.parts is None else jnp.where(self.is_alone, 0, context_len)

    @property
    def first_part(self) -> jax.Array:
        """i32[max_seqs], place of the first part that is to be put into a row; past all for none."""
        most = self.cache.config.max_seq_len + 1
        if self.parts is None or self.requests.parts is None:
            return jnp.full_like(self.row_request, most)
        starts = get_at(self.requests.parts, self.row_request, 0)[..., 0]
        is_kept = (self.parts.ids != NO_PART) & ~self.is_alone[:, None]
        return jnp.min(jnp.where(is_kept, starts, most), axis=1)

    @property
    def is_put_together(self) -> jax.Array:
        """bool[max_seqs], the row computes something other than its request's next tokens."""
        if self.parts is None:
            return self.is_alone
        is_pending = (self.parts.ids != NO_PART).any(axis=1) | self.parts.is_again.any(axis=1)
        return self.is_alone | (self.is_running & is_pending)

    def prefix_len(self, slots: jax.Array) -> jax.Array:
        """Counts the first tokens of requests i32[n] that are looked up and published.

        They end before the first part, but for requests that share what they hold with their like alone.
        """
        most = jnp.full_like(slots, self.cache.config.max_seq_len)
        if self.requests.parts is None or self.requests.keeps_end is None:
            return most
        parts = get_at(self.requests.parts, slots, 0)
        is_end = (parts[..., 1] > parts[..., 0]) & ~get_at(self.requests.keeps_end, slots, False)[:, None]
        return jnp.min(jnp.where(is_end, parts[..., 0], most[:, None]), axis=1)

    @property
    def row_generated(self) -> jax.Array:
        """i32[max_seqs], tokens after the prompt of each row's request."""
        return get_at(self.num_generated, self.row_request, 0)

    @property
    def row_tokens(self) -> jax.Array:
        """i32[max_seqs, max_seq_len], tokens of each row's request; after `row_length` they are arbitrary."""
        return self.tokens_of(self.row_request)

    def tokens_of(self, slots: jax.Array, places: jax.Array | None = None) -> jax.Array:
        """Reads the tokens of requests at `places` i32[m], i32[n, m]; those after their length are arbitrary.

        Default: all places below `max_seq_len`.
        """
        if places is None:
            places = jnp.arange(self.cache.config.max_seq_len, dtype=jnp.int32)
        start = get_at(self.requests.start, slots, 0)
        return get_at(self.requests.tokens, start[:, None] + places[None])

    @property
    def wants_prompt(self) -> jax.Array:
        """bool[R], the log-probabilities of its prompt are still to be reported."""
        return self.requests.wants_prompt & (self.num_generated == 0)

    @property
    def num_to_compute(self) -> jax.Array:
        """i32[max_seqs], tokens of each running row that are not in the cache, and can be computed by now."""
        length, context_len = self.row_length, self.cache.context_len
        if self.parts is not None:
            length = jnp.minimum(length, self.first_part)
            length = jnp.where(self.parts.is_again.any(axis=1), context_len, length)
        return jnp.where(self.is_running, length - context_len, 0)

    @property
    def num_wanted(self) -> jax.Array:
        """i32[max_seqs], tokens that rows are to get blocks for: the next, or all to the last part."""
        wanted = (self.num_to_compute > 0).astype(jnp.int32)
        if self.parts is None or self.requests.parts is None:
            return wanted
        ends = get_at(self.requests.parts, self.row_request, 0)[..., 1]
        last = jnp.max(jnp.where(self.parts.ids != NO_PART, ends, 0), axis=1)
        return jnp.where(self.cache.context_len == self.first_part, last - self.cache.context_len, wanted)

    @property
    def is_at_last(self) -> jax.Array:
        """bool[max_seqs], a running row lacks the last token of its request alone."""
        is_last = self.row_length - self.cache.context_len == 1
        return (self.num_to_compute == 1) & is_last & ~self.is_alone

    @property
    def step(self) -> jax.Array:
        """i32[], steps so far, modulo 2**32: differences are ages."""
        return self.counters[EngineCounter.STEPS].astype(jnp.int32)

    @property
    def has_work(self) -> jax.Array:
        """bool[], some request waits or runs."""
        return ((self.phase >= Phase.WAITING) & (self.phase <= Phase.PREEMPTED)).any()


def empty_state(
    cache: Cache, sizes: TableSizes, outbox_shape: tuple[int, int], counters: Any = 0
) -> EngineState:
    """Makes the state of an engine without requests on an idle cache; all but the cache in numpy.

    `counters` u32[len(EngineCounter)] go on from another state's.
    """

    def zeros(*shape: int, fill: Any = 0, dtype: Any = np.int32) -> Any:
        return np.full(shape, fill, dtype)

    num_slots, max_seqs = sizes.num_slots, cache.max_seqs
    return EngineState(
        cache=cache,
        requests=empty_requests(sizes),
        phase=zeros(num_slots),
        num_generated=zeros(num_slots),
        num_preemptions=zeros(num_slots),
        num_bypassed=zeros(num_slots),
        num_cached=zeros(num_slots, fill=-1),
        row_request=zeros(max_seqs, fill=num_slots),
        is_ended=zeros(max_seqs, dtype=bool),
        may_publish=zeros(max_seqs, dtype=bool),
        may_admit=zeros(dtype=bool),
        service=zeros(sizes.num_clients),
        outbox=zeros(*outbox_shape),
        outbox_len=zeros(),
        counters=zeros(len(EngineCounter), fill=counters, dtype=np.uint32),
        parts=empty_part_rows(sizes.parts.max_parts, max_seqs, cache.config.max_seq_len),
    )


def count(state: EngineState, **events: jax.Array) -> EngineState:
    """Adds to counters by their names in lower case; masks count their true entries."""
    counters, order = state.counters, np.arange(len(EngineCounter))
    for name, num in events.items():
        num = num_true(num) if num.dtype == bool else num
        is_it = (order == EngineCounter[name.upper()]).astype(np.uint32)
        counters += num.astype(jnp.uint32) * is_it
    return dataclasses.replace(state, counters=counters)


NUM_COLUMNS = 5
NO_TOKEN = -1
OF_PROMPT = -1
"""In place of a `Finish`: the entry has a position of the prompt for a token, and its log-probability."""


def outbox_width(num_top_logprobs: int) -> int:
    """Computes the length of an entry."""
    return NUM_COLUMNS + 2 * num_top_logprobs


def bits_of(values: jax.Array) -> jax.Array:
    """Takes floats as i32, bit by bit."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def note_in_outbox(
    state: EngineState,
    mask: jax.Array,
    slots: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    finish: jax.Array,
    tops: tuple[jax.Array, jax.Array] | None = None,
) -> EngineState:
    """Appends the masked events, all i32[n] or f32[n], in their order; `tops` i32[n, K] and f32[n, K].

    An entry is a row of i32: slot, uid, token, bits of its log-probability, `Finish`; then the most probable
    tokens, then the bits of theirs. A token is -1 where a request ends without one. There must be room.
    """
    uid = get_at(state.requests.uid, slots, -1)
    columns = [slots, uid, tokens, bits_of(logprobs), finish]
    entries = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    width = state.outbox.shape[1]
    if tops is not None:
        entries = jnp.concatenate([entries, tops[0].astype(jnp.int32), bits_of(tops[1])], axis=1)
    entries = jnp.pad(entries, ((0, 0), (0, width - entries.shape[1])))
    rank, num = rank_true(mask)
    place = jnp.where(mask, state.outbox_len + rank, state.outbox.shape[0])
    outbox = set_at(state.outbox, place, entries)
    return dataclasses.replace(state, outbox=outbox, outbox_len=state.outbox_len + num)
