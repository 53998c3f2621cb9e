"""A cache for host code that thinks in request ids: evaluation harnesses, servers, notebooks.

The manager holds one `Cache` and calls the pure functions on it. All it adds is which request has which row,
and the hit figures of the last requests; everything else is read from the cache when it is asked for.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import static_count, static_flag
from kvcache_jax.core import token_arguments
from kvcache_jax.core.arguments import hashable_id
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.manager import errors, programs
from kvcache_jax.manager.batches import Batches
from kvcache_jax.manager.locked_cache import CacheHolder
from kvcache_jax.manager.queries import Queries
from kvcache_jax.manager.requests import (
    TO_THE_END,
    Batch,
    Metrics,
    RequestRows,
    checked_count,
    checked_final_len,
    checked_widths,
    padded,
    prompt_of,
)
from kvcache_jax.operations.preempt import preempt_to_utilization, select_rows_to_preempt
from kvcache_jax.tiers.attached_store import AttachedStore

_log = logging.getLogger("kvcache_jax")


class CacheManager(Queries):
    """Requests in, blocks and hits out, on a cache that it owns.

    A call that raises `CacheError` has changed nothing. After a step function that started or ended rows, any
    call may raise `OutOfSync`. Calls may come from any thread; they take turns. Ids are any hashable values.

    Example:
      >>> import kvcache_jax as kv
      >>> layer = kv.FullAttention(num_kv_heads=1, head_dim=8)
      >>> config = kv.CacheConfig([layer], num_blocks=8, block_size=4, max_seqs=2, enable_prefix_caching=True)
      >>> def step_fn(cache, batch):  # in place of a model
      ...     return kv.testing.write_tokens(cache, batch.tokens, batch.step), batch.tokens.sum()
      >>> with kv.CacheManager(config) as manager:
      ...     prompt = [5, 6, 7, 8, 9]
      ...     for request_id in ("first", "second"):
      ...         num_cached = manager.allocate_request(request_id, prompt)
      ...         batch = manager.append_tokens(request_id, prompt[num_cached:])
      ...         total = manager.run(step_fn, batch)
      ...         manager.commit_tokens(request_id)
      ...         print(request_id, num_cached, manager.num_computed_tokens(request_id))
      first 0 5
      second 4 5
    """

    def __init__(
        self,
        cache: CacheConfig | Cache,
        *,
        sharding: Sharding | PartitionSpec | None = None,
        widths: Sequence[int] | None = None,
        store: AttachedStore | None = None,
    ):
        """Makes a cache, or takes one over.

        Args:
          cache: A config; or a cache without active rows, such as a restored one, which the manager owns from
            then on.
          sharding: Sharding of a new cache's pools, see `init`.
          widths: Numbers of tokens to which `append_tokens` pads, each a program. Default: 1, then
            powers of four from 16 up to `max_query_len`.
          store: A store, to which committed blocks are saved and in which `find_stored` looks for prompts;
            what it has is loaded first. The manager closes it.
        """
        if not isinstance(store, AttachedStore | None):
            raise TypeError(f"store is {store!r}, expected a kv.tiers.AttachedStore, or None")
        self._holder = CacheHolder(cache, sharding, self._on_lost)
        self._config = self._holder.config
        self._widths = checked_widths(widths, self._config.query_len_limit)
        self._rows = RequestRows(self._config.max_seqs)
        self._batches = Batches()
        self._figures = Metrics()
        self._store = store
        if store is not None:
            with self._holder.turn("CacheManager") as taken:
                self._holder.cache, _ = store.load(taken)

    # --- requests ---

    def allocate_request(
        self,
        request_id: Hashable,
        token_ids: Sequence[int] | np.ndarray,
        *,
        namespace: ArrayLike | None = None,
        priority: int = 0,
        reuse: bool = True,
        items: ArrayLike | None = None,
        replace: bool = False,
    ) -> int:
        """Starts a request and reserves the blocks of its whole prompt.

        Args:
          request_id: A new id.
          token_ids: The prompt.
          namespace: u32[4], who may share its blocks; see `kvcache_jax.namespace`.
          priority: For eviction policies.
          reuse: Looks for a cached prefix.
          items: i32[I, 2], first position and end of each multimodal item in the prompt (see `item_tokens`):
            one is reused whole or not at all, so those that end within the cached tokens are cached.
          replace: Ends a request of this id first. If the new one does not fit, the old one stays.

        Returns:
          How many of its first tokens are cached. The rest is to be appended and computed.

        Raises:
          DuplicateRequest, OutOfRows, OutOfBlocks, TooLong: changed nothing.
        """
        token_ids, replace = (
            token_arguments.host_tokens("token_ids", token_ids),
            static_flag("replace", replace),
        )
        with self._holder.turn("allocate_request") as cache:
            is_replaced = request_id in self._rows
            if is_replaced and not replace:
                raise errors.duplicate(request_id)
            if len(token_ids) > self._config.max_seq_len:
                raise errors.too_long(request_id, len(token_ids), self._config.max_seq_len)
            seq_id = np.int32(self._rows.row(request_id) if is_replaced else self._rows.idle_row(request_id))
            prompt = prompt_of(token_ids, self._config.max_seq_len, namespace, priority, reuse, items)
            new, (admission, num_blocks) = self._holder.on_control(
                programs.admit, seq_id, prompt, np.bool_(is_replaced)
            )
            status = Status(int(admission.status[0]))
            if status == Status.OUT_OF_BLOCKS:
                needs = self._holder.fetch(
                    programs.shortage(programs.without_pools(cache), seq_id, prompt, np.bool_(is_replaced))
                )
                raise errors.out_of_blocks(request_id, *needs)
            if status != Status.OK:
                raise errors.foreign_row(int(seq_id))
            num_cached = int(admission.num_cached[0])
            self._holder.cache = new
            self._batches.lose(request_id)
            self._rows.start(request_id, int(seq_id))
            if reuse and self._config.enable_prefix_caching:
                self._figures.note_query(len(token_ids), num_cached)
            _log.info(
                "allocate_request: request=%r prompt_tokens=%d cached_tokens=%d new_tokens=%d blocks=%d",
                request_id,
                len(token_ids),
                num_cached,
                len(token_ids) - num_cached,
                int(num_blocks),
            )
            return num_cached

    @overload
    def append_tokens(self, new: Hashable, token_ids: Sequence[int] | np.ndarray) -> Batch: ...

    @overload
    def append_tokens(self, new: Mapping[Any, Sequence[int] | np.ndarray]) -> Batch: ...

    def append_tokens(self, new: Any, token_ids: Any = None) -> Batch:
        """Reserves slots for new tokens of one request, or of several; all of them or none.

        The tokens' keys and values are yet to be written: pass the batch to `run`, with a step function that
        writes them. With windows, do so before more is appended to the same request. If the step fails,
        `truncate_request` takes the tokens back, as far as windows allow (`WindowLost`).

        Args:
          new: A request id; or `{request_id: token_ids}`, one row each, in this order.
          token_ids: The tokens of the one request.

        Returns:
          A `Batch` for the step function.

        Raises:
          UnknownRequest, OutOfBlocks, TooLong: changed nothing, in no request.
          ValueError, TypeError: no request, or tokens that are no ids.
        """
        if (token_ids is None) != isinstance(new, Mapping):
            raise TypeError("expected a request id and its token_ids, or one mapping from ids to token_ids")
        new = {hashable_id("request_id", new): token_ids} if token_ids is not None else new
        new = {request_id: token_arguments.host_tokens("token_ids", ids) for request_id, ids in new.items()}
        if not new:
            raise ValueError("got no request, expected at least one")
        limit = self._widths[-1]
        for request_id, ids in new.items():
            if len(ids) > limit:
                raise errors.too_many_at_once(request_id, len(ids), limit)
        with self._holder.turn("append_tokens"):
            seq_ids = self._rows.seq_ids_of(list(new))
            num_new, tokens = padded(list(new.values()), len(seq_ids), self._widths)
            on_device, step, status = self._holder.step(programs.append, seq_ids, num_new, tokens)
            status, ends = self._holder.fetch((status, step.context_len))
            for request_id, code in zip(new, status, strict=False):
                if code != Status.OK:
                    raise self._append_error(request_id, Status(int(code)), seq_ids, num_new)
            batch = Batch(on_device, step)
            self._batches.hand_out(batch, {name: len(ids) for name, ids in new.items()}, ends.tolist())
            return batch

    def commit_tokens(
        self,
        request_id: Hashable | Mapping[Any, int | None],
        final_len: int | None = None,
        *,
        is_end: bool = True,
    ) -> None:
        """Publishes the full blocks of a request, or of several, so that later prompts can reuse them.

        Call it after their keys and values are written. Batches made before may be stale then.

        Args:
          request_id: The request; or `{request_id: final_len}`, of which there may be none.
          final_len: Tokens that will not be taken back, such as without drafts. Default: all.
          is_end: Whether the requests are complete, so that the last states of recurrent layers are kept
            too; False after each step of a loop. See `Snapshots`.

        Raises:
          UnknownRequest: changed nothing.
          ValueError: The cache has no prefix caching.
          TypeError: A mapping, and `final_len` beside it.
        """
        lengths = (
            dict(request_id)
            if isinstance(request_id, Mapping)
            else {hashable_id("request_id", request_id): final_len}
        )
        if isinstance(request_id, Mapping) and final_len is not None:
            raise TypeError(
                f"got {len(lengths)} requests and final_len = {final_len}, expected {{request_id: final_len}}"
            )
        lengths = {name: checked_final_len(name, length) for name, length in lengths.items()}
        is_end = static_flag("is_end", is_end)
        with self._holder.turn("commit_tokens"):
            if not lengths:
                return
            seq_ids = self._rows.seq_ids_of(list(lengths))
            final = np.full(len(seq_ids), TO_THE_END, np.int32)
            final[: len(lengths)] = list(lengths.values())
            self._change(list(lengths), programs.commit, seq_ids, final, is_end)
            self._batches.move(lengths)
            if self._store is not None and self._holder.cache is not None:
                self._store.save(self._holder.cache)

    def fork_request(self, request_id: Hashable, new_id: Hashable) -> None:
        """Starts a request that shares all tokens of another; takes no block.

        Call it after the other's keys and values are written: whichever of the two appends first copies the
        shared last block as it is then.

        Raises:
          UnknownRequest, DuplicateRequest, OutOfRows: changed nothing.
        """
        with self._holder.turn("fork_request") as cache:
            source = self._rows.seq_ids_of([request_id])
            if new_id in self._rows:
                raise errors.duplicate(new_id)
            target = self._rows.idle_row(new_id)
            if self._holder.fetch(cache.is_active)[target]:
                raise errors.foreign_row(target)
            self._change([request_id], programs.fork, source, np.array([target], np.int32))
            self._rows.start(new_id, target)

    def truncate_request(self, request_id: Hashable, new_len: int) -> None:
        """Drops tokens from the end of a request; releases blocks left without a token, reserved ones too.

        Raises:
          UnknownRequest, TooLong (it has fewer tokens), WindowLost: changed nothing.
        """
        new_len = static_count("new_len", new_len, least=0)
        with self._holder.turn("truncate_request"):
            seq_ids = self._rows.seq_ids_of([request_id])
            if new_len > self._config.max_seq_len:
                raise errors.longer_than(request_id, new_len, self.num_computed_tokens(request_id))
            self._change([request_id], programs.truncate, seq_ids, np.array([new_len], np.int32))
            self._batches.lose(request_id, new_len)

    def free_request(self, request_id: Hashable) -> None:
        """Ends a request, also one whose row a step function has ended (see `OutOfSync`).

        Published blocks stay cached until their place is needed.

        Raises:
          UnknownRequest: changed nothing.
        """
        with self._holder.turn("free_request"):
            seq_ids = self._rows.seq_ids_of([request_id])
            # The one way to fail is that the row is idle already.
            self._holder.cache, _ = self._holder.on_control(programs.free, seq_ids)
            self._end(request_id)

    def find_stored(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: ArrayLike | None = None
    ) -> bool:
        """Looks for a prompt in the store, without waiting; call it before `allocate_request`.

        Returns:
          True if the request may start: what the store has of the prompt is in the cache. False for "later".
          Always True without a store.
        """
        with self._holder.turn("find_stored") as cache:
            if self._store is None:
                return True
            self._holder.cache, is_done = self._store.find(cache, token_ids, namespace)
            return is_done

    # --- blocks and rows that are given up ---

    def evict(self, num_blocks: int) -> int:
        """Gives up cached blocks, the least valuable first; returns how many were evicted."""
        num_blocks = checked_count("num_blocks", num_blocks)
        with self._holder.turn("evict"):
            self._holder.cache, count = self._holder.on_control(programs.evict, np.int32(num_blocks))
            return int(count)

    def select_requests_to_preempt(self, policy: str, n: int) -> list[Hashable]:
        """Selects the requests to preempt first, at most `n`; ends none.

        See `kvcache_jax.select_rows_to_preempt`.

        Raises:
          OutOfSync: A step function started a row that would be one of them.
        """
        with self._holder.turn("select_requests_to_preempt") as cache:
            num_rows = max(1, min(static_count("n", n, least=0), cache.max_seqs))
            rows = select_rows_to_preempt(programs.without_pools(cache), policy, num_rows)
            return self._rows.requests_at(self._holder.fetch(rows)[:n])

    def preempt_to_utilization(
        self, target: float, policy: str | None = None, *, operation: Callable = preempt_to_utilization
    ) -> list[Hashable]:
        """Takes blocks back from requests until `usage` is at most `target`.

        Args:
          target: Share of referenced blocks, 0 to 1.
          policy: The order of the requests. Default: the operation's.
          operation: `(cache, target, policy=...) -> (cache, rows)`, on the control state alone. Default:
            `kvcache_jax.preempt_to_utilization`, which ends requests; others may continue them.

        Returns:
          The requests that gave blocks back, in that order; those that were ended are no longer known, and
          their published blocks stay cached.

        Raises:
          OutOfSync: A step function started a row that would be among them; changed nothing.
          ValueError, TypeError: As the operation's.
        """
        if not callable(operation):
            raise TypeError(
                f"operation is {operation!r}, expected a function (cache, target) -> (cache, rows)"
            )
        options = {} if policy is None else {"policy": policy}
        with self._holder.turn("preempt_to_utilization"):
            cache, rows = self._holder.on_control(functools.partial(operation, target=target, **options))
            preempted = self._rows.requests_at(rows)
            is_active = self._holder.fetch(cache.is_active)
            self._holder.cache = cache
            for request_id, row in zip(preempted, rows.tolist(), strict=False):  # rows end with nowhere
                if not is_active[row]:
                    self._end(request_id)
            return preempted

    def reset_prefix_cache(self) -> int:
        """Forgets all published contents; returns how many blocks of all layer groups they had.

        When the weights change, end all requests first: their keys were computed with the old ones.
        """
        with self._holder.turn("reset_prefix_cache"):
            self._holder.cache, count = self._holder.on_control(programs.reset_prefix_cache)
            return int(count)

    # --- steps ---

    def run(self, step_fn: Callable[..., tuple[Cache, Any]], *args: Any) -> Any:
        """Calls `step_fn(cache, *args) -> (cache, result)`, jitted, the cache donated; keeps the cache.

        Compiled once per function object and shapes of `args`: pass the same function each time, not a new
        lambda. The function may extend, write, commit and truncate; rows start and end through the manager
        alone. Returns before the device is done; until then, as with `jax.jit`, numpy arrays in `args` may
        still be read, so do not overwrite them.

        Errors of the function while it is traced or compiled come through, and nothing has changed: tokens
        that were appended for this step stay appended, see `append_tokens`.

        Returns:
          The result.

        Raises:
          StaleBatch: `args` hold a batch whose slots are no longer its requests', or one of another manager;
            nothing was called. A batch is known by its arrays, so pass it as handed out: copies are not
            found.
          CacheLost: the step failed on the device, which had been given the cache, or another caller donated
            the cache. The manager starts over, empty. A failure that shows only later, for the
            device works ahead, is raised by the next call that looks at the cache.
        """
        with self._holder.turn("run") as cache:
            self._batches.check(args, cache, self._holder.fetch)
            result = self._holder.step(self._holder.compiled(step_fn), *args)
            self._batches.move(self._rows)
            return result

    def query[T](self, question: Callable[..., T], *args: Any) -> T:
        """Calls `question(cache, *args)` in a turn of its own: `manager.query(kv.check_invariants)`.

        The answer must not hold the cache or its arrays: the next step is given them. So the question cannot
        `run` one.
        """
        if not callable(question):
            raise TypeError(f"question is {question!r}, expected a function of the cache")
        with self._holder.turn("query") as cache, self._holder.kept():
            return self._holder.ask(question, cache, *args)

    # --- the end ---

    def close(self) -> None:
        """Releases the cache; every later call but this one raises `ManagerClosed`."""
        self._holder.close()
        self._rows.clear()
        self._batches.clear()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> "CacheManager":
        with self._holder.turn("with"):
            return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- within a turn ---

    def _change(self, request_ids: Sequence[Hashable], program: Callable, *args: Any) -> None:
        """Changes rows without moving keys or values; all of them or none."""
        new, status = self._holder.on_control(program, *args)
        for request_id, code in zip(request_ids, status, strict=False):
            if code == Status.TOO_LONG:
                raise errors.longer_than(request_id, int(args[1][0]), self.num_computed_tokens(request_id))
            if code == Status.WINDOW_LOST:
                raise errors.window_lost(request_id, int(args[1][0]))
            if code != Status.OK:
                raise errors.out_of_sync(request_id, Status(int(code)))
        self._holder.cache = new

    def _append_error(
        self, request_id: Hashable, status: Status, seq_ids: np.ndarray, num_new: np.ndarray
    ) -> errors.CacheError:
        cache = self._holder.cache
        assert cache is not None
        *needs, lengths = self._holder.fetch(
            programs.append_needs(programs.without_pools(cache), seq_ids, num_new)
        )
        if status == Status.OUT_OF_BLOCKS:
            return errors.out_of_blocks(request_id, *needs)
        if status == Status.TOO_LONG:
            row = seq_ids.tolist().index(self._rows.row(request_id))
            return errors.too_long(request_id, int(lengths[row] + num_new[row]), self._config.max_seq_len)
        return errors.out_of_sync(request_id, status)

    def _end(self, request_id: Hashable) -> None:
        """Ends a request whose row is idle: neither its row nor its batches are known any more."""
        self._batches.lose(request_id)
        self._rows.end(request_id)

    def _on_lost(self) -> list[Hashable]:
        """Ends all requests of a lost cache; the counters of the new one begin again."""
        lost = list(self._rows)
        for request_id in lost:
            self._end(request_id)
        self._figures.restart()
        return lost
