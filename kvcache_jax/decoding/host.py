"""The host side of decoding: the continuation that each row decodes, the results, and the ends of rows."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.blocks.block_pool import num_used
from kvcache_jax.core.arguments import namespace_words
from kvcache_jax.core.cache_checks import require_values
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache
from kvcache_jax.decoding.arguments import prompt_seeds, prompt_tokens
from kvcache_jax.decoding.loop import DecodeState, RowPhase
from kvcache_jax.decoding.options import StopStrings, Watch
from kvcache_jax.decoding.own_prompts import CheckedRows
from kvcache_jax.operations.commit import commit
from kvcache_jax.operations.free import free

_FINISH_REASONS = {
    RowPhase.STOPPED: "stop",
    RowPhase.LENGTH: "length",
    RowPhase.OUT_OF_BLOCKS: "out_of_blocks",
    RowPhase.NAN_LOGITS: "nan_logits",
}

# Lists of fewer rows have a program together: to compile one for each takes longer than it ever saves.
_SHORTEST_LIST = 8


@dataclasses.dataclass
class Generation:
    """One continuation of one prompt.

    Attributes:
      prompt_id: Index of the prompt in the call.
      sample_id: Index among the prompt's samples.
      tokens: New tokens; the stop token, if one ended it, is the last.
      logprobs: Log-probability of each under the model's own distribution.
      finish_reason: "stop", "length" (`max_new_tokens`, or the row is at `max_seq_len`), "out_of_blocks", or
        "nan_logits": of the logits after `tokens` one is NaN or +inf, or all are -inf, so nothing was drawn.
    """

    prompt_id: int
    sample_id: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclasses.dataclass
class Snapshot:
    """The cache as the host saw it between two segments, before rows that ended were freed.

    Attributes:
      num_steps: Decode steps so far.
      seconds: Host clock since the call began.
      num_blocks_used: Referenced blocks, all groups.
      num_refs: Table entries that point at them; the difference is saved by sharing.
      num_active_seqs: Rows that hold a sequence.
      running: {row: (prompt_id, sample_id)} of rows that decode.
      ended: Continuations that ended since the snapshot before.
      block_tables: Per group, i32[max_seqs, max_blocks_per_seq]; none in a timeline, which would hold them
        all: `on_check_in` gets them.
    """

    num_steps: int
    seconds: float
    num_blocks_used: int
    num_refs: int
    num_active_seqs: int
    running: dict[int, tuple[int, int]]
    ended: list[Generation]
    block_tables: list[np.ndarray]


class Stopwatch:
    """Host seconds within device work."""

    def __init__(self):
        self.seconds = 0.0

    @explicit_transfers
    def __call__[T](self, work: Callable[..., T], *args, **kwargs) -> T:
        """Does `work` and waits for its result."""
        start = time.perf_counter()
        result = jax.block_until_ready(work(*args, **kwargs))
        self.seconds += time.perf_counter() - start
        return result


@explicit_transfers
def snapshot_of(
    cache: Cache,
    num_steps: int | jax.Array,
    seconds: float,
    running: dict[int, tuple[int, int]],
    ended: Sequence[Generation] = (),
) -> Snapshot:
    """Records the present owners of blocks."""
    pools = cache.control.block_pools
    tables = [np.array(pool.block_table) for pool in pools]  # copies: the cache is donated next
    num_refs = (int((t < pool.num_blocks).sum()) for t, pool in zip(tables, pools, strict=True))
    return Snapshot(
        num_steps=int(num_steps),
        seconds=seconds,
        num_blocks_used=sum(int(num_used(pool)) for pool in pools),
        num_refs=sum(num_refs),
        num_active_seqs=int(np.asarray(cache.is_active).sum()),
        running=dict(running),
        ended=list(ended),
        block_tables=tables,
    )


def row_list(rows: Sequence[int], max_seqs: int) -> np.ndarray:
    """Pads rows with `max_seqs` to i32[n], n a power of two of at least 8, and at most all rows."""
    num_rows = max(len(rows), _SHORTEST_LIST)
    padded = np.full(min(1 << (num_rows - 1).bit_length(), max_seqs), max_seqs, np.int32)
    padded[: len(rows)] = rows
    return padded


@explicit_transfers
def idle_cache(caller: str, cache: Cache | None, config: CacheConfig) -> Cache:
    """Returns the caller's cache, or an empty one for None; refuses one that cannot be continued."""
    if cache is None:
        return init(config)
    require_values(caller, cache, pools=True)
    if cache.config != config:
        raise ValueError(f"cache has the config {cache.config}, expected that of the call, {config}")
    if cache.is_active.any():
        raise ValueError(
            f"cache has {int(cache.is_active.sum())} active rows, expected all idle: free them first"
        )
    return cache


class WaitingPrompts:
    """The prompts of a call, and which of their samples wait for rows."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        namespace: ArrayLike | None,
        seed: int | Sequence[int],
    ):
        self.prompts = prompt_tokens(prompts)
        self.num_samples = num_samples
        self.namespaces = np.asarray(namespace_words(namespace, len(self.prompts)))  # u32[prompts, 4]
        # Two numbers per prompt that, with the sample's, begin a stream of random numbers.
        self.seeds = prompt_seeds(seed, len(self.prompts))
        # Prompts with samples that no row decodes yet, and these samples.
        self.waiting = deque((prompt_id, range(num_samples)) for prompt_id in range(len(self.prompts)))


class Host:
    """The host's record: the continuation that each row decodes, and the results so far."""

    def __init__(
        self,
        requests: WaitingPrompts,
        config: CacheConfig,
        stop_strings: StopStrings | None,
        watch: Watch,
    ):
        self.requests, self.config = requests, config
        self.stop_strings, self.watch = stop_strings, watch
        self.running: dict[int, tuple[int, int]] = {}
        self.num_streamed: dict[int, int] = {}
        self.done: list[Generation] = []
        self.timeline: list[Snapshot] = []
        self.start = time.perf_counter()

    def note(self, state: DecodeState, ended: Sequence[Generation] = ()) -> None:
        """Adds the cache, as it is now, to the timeline."""
        seconds = time.perf_counter() - self.start
        snapshot = snapshot_of(state.cache, state.num_steps, seconds, self.running, ended)
        self.timeline.append(dataclasses.replace(snapshot, block_tables=[]))
        if self.watch.on_check_in:
            self.watch.on_check_in(snapshot)

    def check_in(self, state: DecodeState, prompt_rows: CheckedRows) -> DecodeState:
        """Streams new tokens, collects the rows that ended and frees them."""
        phase, length, prompt_len, history, logprobs = jax.device_get(
            (state.phase, state.length, state.prompt_len, state.history, state.logprobs)
        )
        ended: dict[int, Generation] = {}
        for row, (prompt_id, sample_id) in self.running.items():
            tokens = history[row, prompt_len[row] : length[row]].tolist()
            cut = self._stop_at(tokens, self.num_streamed[row])
            tokens = tokens if cut is None else tokens[:cut]
            new = tokens[self.num_streamed[row] :]
            if new and self.watch.on_tokens:
                self.watch.on_tokens(prompt_id, sample_id, new)
            self.num_streamed[row] += len(new)
            if cut is None and phase[row] == RowPhase.RUNNING:
                continue
            why = "stop" if cut is not None else _FINISH_REASONS[RowPhase(phase[row])]
            scores = logprobs[row, prompt_len[row] :][: len(tokens)].tolist()
            ended[row] = Generation(prompt_id, sample_id, tokens, scores, why)
        self.note(state, list(ended.values()))
        self.done += ended.values()
        state = self._end(state, ended, prompt_rows)
        for row in ended:
            del self.running[row]
        return state

    def _stop_at(self, tokens: list[int], num_checked: int) -> int | None:
        """Counts the tokens that complete the first stop string, None without one; `num_checked` do not."""
        if self.stop_strings is None:
            return None
        # Not the whole text alone: a character that is not finished yet may hide one before it.
        for end in range(num_checked + 1, len(tokens) + 1):
            text = self.stop_strings.detokenize(tokens[:end])
            if not isinstance(text, str):
                kind = type(text).__name__
                raise TypeError(f"detokenize returned a {kind}, expected a str, the text of all tokens given")
            if any(stop in text for stop in self.stop_strings.texts):
                return end
        return None

    @explicit_transfers
    def _end(self, state: DecodeState, ended: dict[int, Generation], prompt_rows: CheckedRows) -> DecodeState:
        """Frees the rows that ended, of which the tokens stay cached that the prompts' feature says."""
        if not ended:
            return state
        max_seqs, rows, phase = self.config.max_seqs, list(ended), np.array(state.phase)
        cache, ids, published = state.cache, row_list(rows, max_seqs), np.zeros(max_seqs, np.int32)
        for row in [row for row in rows if phase[row] != RowPhase.NAN_LOGITS]:
            cache, published[row] = prompt_rows.keep_end(cache, self.running[row][0], row, ended[row].tokens)
        if cache.config.enable_prefix_caching:
            to_publish = row_list(np.flatnonzero(published).tolist(), max_seqs)
            cache, _ = commit(cache, to_publish, final_len=np.append(published, 0)[to_publish])
        cache, _ = free(cache, ids)
        draft_cache = state.draft_cache
        if draft_cache is not None:
            draft_cache, _ = free(draft_cache, ids)
        phase[rows] = RowPhase.IDLE
        return dataclasses.replace(state, cache=cache, draft_cache=draft_cache, phase=jnp.asarray(phase))
