"""The engine on the host: it packs requests, starts dispatches, and delivers the results.

Where requests neither come nor go a dispatch starts before the report of the one before is read, so that the
device does not wait for the host.
"""

import asyncio
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_list, static_count, static_flag
from kvcache_jax.core.arguments import hashable_id
from kvcache_jax.core.attachment import Attachment
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.decoding.arguments import check_model, require_functions
from kvcache_jax.decoding.forward import Forward, prepared
from kvcache_jax.decoding.options import require_option
from kvcache_jax.engine.alarm import alarm
from kvcache_jax.engine.attachments import Attachments
from kvcache_jax.engine.delivery import Delivery
from kvcache_jax.engine.device import Arrival, Device
from kvcache_jax.engine.events import EngineFigures, TokenEvent
from kvcache_jax.engine.failure import uninterrupted
from kvcache_jax.engine.inputs import Inputs
from kvcache_jax.engine.options import (
    LIMITS,
    SCHEDULE,
    Limits,
    Options,
    Placement,
    Schedule,
    batch_invariant_config,
    check_options,
    inbox_sizes,
    most_admissions,
    size,
    table_sizes,
    with_budget,
)
from kvcache_jax.engine.pace import Length, Pace
from kvcache_jax.engine.policies import policies
from kvcache_jax.engine.program import Inbox, outbox_len
from kvcache_jax.engine.requests import GenerationRequest, one_namespace
from kvcache_jax.engine.shards import Shards
from kvcache_jax.engine.state import EngineState, outbox_width
from kvcache_jax.engine.step import Model, ProcessLogits
from kvcache_jax.engine.table import RequestTable, checked_ids
from kvcache_jax.prefix import names

_MOST_ENDED = 64
"""Requests that one dispatch can be told to end."""
_DISPATCHES_AHEAD = 2
"""Where the caller chooses their length."""
_POLL_S = 0.001


class Engine:
    """Continuous batching for any model: admission, prefill, decoding and preemption in one program.

    Iterate over it, with `for` or `async for`, for `TokenEvent`s until all requests have ended, one consumer
    at a time. Any thread may `push`, `cancel`, `set_params` and ask for `figures`, `metrics`, `namespace_of`
    and `num_unfinished` at any time: they wait for `reset`, `release` and `restore`, never for tokens. After
    an exception in the consumer, in the model while it is traced, or an interrupt, it goes on where it was;
    after `EngineFailed`, when it is `reset`.

    Args:
      forward: The model, as for `generate`, pure. It sees the mesh that is set now if the engine lives there.
      params: Its parameters. The engine lives on the device, or the mesh, to which they are committed, else
        on the default device; later ones are moved there.
      config: Of the cache that the engine makes.
      policy: "fcfs", "priority" (higher first, with ageing), "longest prefix" (most cached first), "fair"
        (the client with the least service first), or a name registered with `request_policy`.
      token_budget: Most tokens of a step. Default: one of each row, and as many of prompts as there are
        rows, at least 256.
      schedule: The policy's parameters, and the blocks in reserve, `kv.engine.Schedule(watermark=0.05)`.
      limits: How many requests it takes, and how large, `kv.engine.Limits(max_requests=1024)`.
      num_drafts: Draft tokens per row and step, from the row's own text; they count against the budget.
      num_top_logprobs: Most probable tokens reported with each token.
      process_logits: `(logits f32[max_seqs, vocab], state) -> logits`, for masks, penalties and bans; -inf is
        a ban. A request whose tokens are all banned ends with the finish reason "no_token". If it has a
        parameter `inputs`, it is handed the rows' inputs, {name: [max_seqs, ...]}; `params` is the model's.
      inputs: What a request may say to the program: {name: dtype}, or a `jax.ShapeDtypeStruct` each; with
        states that change, or parts of prompts, `kv.engine.Inputs`. A model with a parameter `inputs` gets
        the values of its rows.
      batch_invariant: The bits of a token's logits depend on its tokens and their positions alone, not on
        other requests of the batch, on hits, preemptions or the budget. See `invariant.py`.
        Attention is XLA's then: kernels are refused.
      steps_per_dispatch: Most steps between two check-ins of the host. They are as few as keep the host's
        part of the time small, and fewer where a request gets its first token or ends.
      namespace: u32[4], of the weights, within which each request has its own; see `namespace_of`.
      placement: A mesh to run on, `kv.engine.Placement(mesh, row_axis="rows")`. Default: one device.

    Raises:
      ValueError, TypeError: sizes that do not fit together, no model.

    Example:
      >>> import jax, jax.numpy as jnp, kvcache_jax as kv
      >>> def forward(params, tokens, cache, step):  # the next token is one more, whatever was before
      ...     k = jnp.zeros((*tokens.shape, 1, 8))
      ...     cache, _ = kv.attention(cache, 0, k, k, k, step)
      ...     return 9.0 * jax.nn.one_hot(tokens + 1, 8), cache
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=2, max_seq_len=32)
      >>> engine = kv.Engine(forward, {}, config)
      >>> engine.push([kv.GenerationRequest([1, 2], 3), kv.GenerationRequest([4], 2)])
      2
      >>> answers = {0: [], 1: []}
      >>> for event in engine:
      ...     answers[event.id] += event.tokens
      >>> answers
      {0: [3, 4, 5], 1: [5, 6]}
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        config: CacheConfig,
        *,
        policy: str = "fcfs",
        token_budget: int | None = None,
        schedule: Schedule = SCHEDULE,
        limits: Limits = LIMITS,
        num_drafts: int = 0,
        num_top_logprobs: int = 0,
        process_logits: ProcessLogits | None = None,
        inputs: Inputs | Mapping[str, Any] | None = None,
        batch_invariant: bool = False,
        steps_per_dispatch: int = 32,
        namespace: ArrayLike | None = None,
        placement: Placement | None = None,
    ):
        check_model("Engine", forward, config, params)
        inputs = inputs if isinstance(inputs, Inputs) else Inputs({} if inputs is None else inputs)
        hooks: dict[str, Any] = {"process_logits": process_logits, "advance_inputs": inputs.advance}
        require_functions(**hooks)
        policies.find(policy)
        require_option("schedule", schedule, Schedule)
        require_option("limits", limits, Limits)
        require_option("placement", placement, Placement, or_none=True)
        if static_flag("batch_invariant", batch_invariant):
            config = batch_invariant_config(config)
        self.config = config
        options = Options(
            policy=policy,
            num_pieces=1,
            piece_len=1,
            num_drafts=size("num_drafts", num_drafts, 0),
            num_top_logprobs=size("num_top_logprobs", num_top_logprobs, 0),
            schedule=schedule,
            most_admissions=most_admissions(config.max_seqs),
            batch_invariant=batch_invariant,
            prompt_logprobs=limits.prompt_logprobs,
            parts=inputs.parts,
        )
        self._options = with_budget(options, config, token_budget)
        check_options(self._options, config, **hooks)
        self._sizes = dataclasses.replace(table_sizes(limits, config, inputs), num_tops=num_top_logprobs)
        entering = inbox_sizes(self._sizes, config)
        self._steps = size("steps_per_dispatch", steps_per_dispatch)
        params, self._forward = prepared(forward, params), forward
        self._attached = Attachments(config, placement is not None, self._hear_answer)
        shards = Shards(placement, config, params)
        self._num_rows = shards.num_shards * config.max_seqs
        self._tables = [
            RequestTable(self._sizes, entering, _MOST_ENDED, config, shards.num_shards)
            for _ in range(shards.num_shards)
        ]
        num_entries = outbox_len(self._options, config.max_seqs, self._steps, entering.num_slots, _MOST_ENDED)
        outbox = num_entries, outbox_width(self._options.num_top_logprobs)
        self._delivery = Delivery(self._tables, config, self._sizes.num_slots, outbox[1])
        self._device = Device(shards, Model(forward, **hooks), self._options, params, self._sizes, outbox)
        self._pace = Pace(self._steps, self._device.shorten if self._device.hears else None)
        self._device.begin(self._delivery.counters())
        self._set_weights(namespace)
        # `_lock` guards all host state. `_consumer` admits one reader at a time: reports stay in order.
        self._lock, self._consumer = threading.RLock(), threading.Lock()
        self.clock: Callable[[], float] = time.monotonic
        self._next_id, self._is_compiled, self._has_new_weights = 0, False, False

    @property
    def params(self) -> Any:
        """The model's parameters, where the engine has them."""
        return self._device.params

    @property
    def state(self) -> EngineState:
        """The engine's state, after all dispatches; donated by the next one.

        With a `row_axis` every array has one more first axis, of shards.

        Raises:
          EngineFailed: it is lost.
        """
        return self._device.state

    @property
    def num_unfinished(self) -> int:
        """Continuations that have not ended, as far as the host knows."""
        return sum(map(len, self._tables))

    def attach(self, attachment: Attachment) -> None:
        """Shows the cache to a store, a publisher of events or another attachment after each dispatch.

        It is asked about each request that is pushed from now on before the request is admitted; one that
        waits for the answer keeps no other waiting. From now on one dispatch is under way at a time.

        Args:
          attachment: Such as a `tiers.AttachedStore`; close it after the engine's last event.

        Raises:
          TypeError, ValueError: no attachment, or one that sees one cache alone, and a mesh.
          RuntimeError: this process follows: of a team the leader alone has it.
        """
        self._device.require_leader("attach")
        with uninterrupted(), self._lock:
            self._attached.add(attachment)
            for table in self._tables:
                table.num_attached += 1

    def push(self, requests: Iterable[GenerationRequest]) -> int:
        """Takes requests, in their order, as many as there is room for.

        Args:
          requests: Each with an `id` of its own, or none.

        Returns:
          How many of them; push the others later.

        Raises:
          ValueError, TypeError: no request, or one with the id of another, with more stop tokens,
            items, samples or a higher client than the engine was made for. Then none was taken.
        """
        with uninterrupted(), self._lock:
            wanted = as_list("requests", requests, "GenerationRequests")
            ids = checked_ids(wanted, self._tables, self._sizes, self.config.max_seq_len)
            now, num_taken, may_begin = self.clock(), 0, self.num_unfinished < self._num_rows
            for request in wanted:
                request_id = request.id
                if request_id is None:
                    while self._next_id in ids or any(self._next_id in table for table in self._tables):
                        self._next_id += 1
                    request_id = self._next_id
                tables = sorted(self._tables, key=lambda table: table.load_with(request))
                if not any(table.add(request, request_id, now) for table in tables):
                    break
                self._next_id += request.id is None
                num_taken += 1
                self._pace.note_news(time.monotonic(), may_begin or request.deadline is not None)
            return num_taken

    def cancel(self, request_id: Hashable) -> bool:
        """Ends all samples of a request, and tells it at once; False if it has ended, or never was.

        Who is in `drain` meanwhile has that event with the report that it waits for, which ends soon on CPUs.
        """
        request_id = hashable_id("id", request_id)
        with uninterrupted(), self._lock:
            has_ended = self._delivery.cancel(request_id, self.clock())
            if has_ended:
                self._pace.note_news(time.monotonic(), is_awaited=True)
            return has_ended

    def set_params(self, params: Any, namespace: ArrayLike | None = None) -> None:
        """Goes on with other parameters from the next dispatch on; rows that run keep their place.

        The keys and values of these rows stay as they are, computed under the old parameters, and none of
        them is published any more. A row that is preempted is computed anew, under the new ones.

        Args:
          params: Of the same shapes and dtypes.
          namespace: u32[4], of the weights: prefixes are shared under equal ones alone. Default: a new one.
        """
        params = self._device.with_same_shapes(prepared(self._forward, params))
        with uninterrupted(), self._lock:
            if namespace is None:
                namespace = names.namespace(weights=f"engine {secrets.token_hex(16)}")
            self._set_weights(namespace)
            self._device.params, self._has_new_weights = params, True

    def namespace_of(self, namespace: ArrayLike | None = None) -> np.ndarray:
        """Finds the namespace in which the cache has a request's blocks, under the present weights.

        Args:
          namespace: u32[4], of the request.

        Returns:
          u32[4], for `lookup` and the like on `state.cache`: a digest of the weights' namespace and the
          request's. Under weights without one it is the request's.

        Example:
          >>> import kvcache_jax as kv
          >>> def forward(params, tokens, cache, step):
          ...     return 1.0 * jax.nn.one_hot(tokens, 8), cache
          >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=2, max_seq_len=32)
          >>> engine = kv.Engine(forward, {}, config, namespace=kv.namespace(weights="of Monday"))
          >>> (engine.namespace_of(None) == engine.namespace_of(kv.namespace(tenant="a"))).any().item()
          False
        """
        return names.namespace_within(self._weights, one_namespace(namespace))

    def figures(self) -> EngineFigures:
        """Figures of the last drain; reads nothing."""
        with self._lock:
            return self._delivery.figures(self._device.read.num_reads)

    def metrics(self) -> dict[str, Any]:
        """Returns figures, counts and latencies under the names of vLLM's metrics; reads nothing.

        Returns:
          {name: number}. Of `vllm:request_success` it is {finish reason: number}, of
          `vllm:prefix_cache_misses` {reason: tokens}, of a histogram {"buckets": {bound: values up to it},
          "sum", "count"}. Times are of `clock`, tokens those that the consumer was told.
        """
        with self._lock:
            figures = self._delivery.figures(self._device.read.num_reads)
            return self._delivery.metrics.as_dict(figures) | self._attached.metrics()

    def __iter__(self) -> Iterator[TokenEvent]:
        events = self._delivery.events
        while self._has_news():
            if not events:
                self.drain()
            while events:
                yield events.popleft()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        events = self._delivery.events
        while self._has_news():
            if not events:
                await asyncio.to_thread(self.drain)
            while events:
                yield events.popleft()

    def drain(self, max_steps: int | None = None) -> None:
        """Starts the next dispatch, and takes in the report of the one before; for a loop of one's own.

        Its events are for `take_events`.

        Args:
          max_steps: Of the next dispatch, at most `steps_per_dispatch`: it makes as many, as long as there is
            work, and another one is under way. Default: as many as the engine chooses.

        Raises:
          EngineFailed: the device, or a callback in the model, failed, now or before; see `reset`.
        """
        if max_steps is not None:
            max_steps = static_count("max_steps", max_steps, most=self._steps, most_name="steps_per_dispatch")
        with self._consumer:
            _ = self._device.state
            if self.num_unfinished or self._has_new_weights:
                self._compile()
            begun_s = time.thread_time()
            pace = self._pace.choose(time.monotonic(), self.num_unfinished < self._num_rows)
            length, num_ahead = (Length(max_steps, max_steps), _DISPATCHES_AHEAD) if max_steps else pace
            with uninterrupted(), self._lock:
                until_late_s = self._end_late()
                self._attached.attend(self._device, self._tables)
                while self._device.num_in_flight < (1 if self._attached else num_ahead) and (
                    self._has_new_weights or any(table.has_work for table in self._tables)
                ):
                    self._dispatch(length)
            if self._device.num_in_flight:
                with alarm(until_late_s if self._device.hears else math.inf, self._end_late):
                    arrival = self._device.arrival()
                with uninterrupted(), self._lock:
                    self._take_in(arrival, begun_s)
                    if not self.num_unfinished:
                        self._attached.attend(self._device, self._tables)
            elif self.num_unfinished:  # all wait for answers of what is attached
                time.sleep(_POLL_S)

    def take_events(self) -> list[TokenEvent]:
        """Takes the events that no consumer has received yet; after `drain`, for a loop of one's own."""
        with self._lock:
            events = list(self._delivery.events)
            self._delivery.events.clear()
            return events

    def compile(self) -> None:
        """Compiles the engine's program, which the first request then does not wait for."""
        with self._consumer:
            self._compile()

    def reset(self) -> None:
        """Makes a new state, with nothing cached, in which all requests that have not ended go on.

        After `EngineFailed`; nothing is compiled. They are computed anew from their prompts and the tokens
        that the consumer was told, so none is told twice or left out, and those that follow are drawn by the
        same random numbers. Requests that were being cancelled, or late, end.

        Raises:
          EngineFailed: the device fails still. Then call it again.
        """
        with self._consumer, uninterrupted(), self._lock:
            self._begin()

    def release(self, *, keep: bool = False) -> None:
        """Gives the memory of the cache back until `restore`, such as for training between rollouts.

        Requests may be pushed and cancelled, and weights set, meanwhile; all go on after `restore`.

        Args:
          keep: Keep the cache in host memory. Default: forget it, as `reset` does.

        Raises:
          EngineFailed, RuntimeError: the device failed, or the memory was given back before.
        """
        keep = static_flag("keep", keep)
        with self._consumer, uninterrupted(), self._lock:
            while self._device.num_in_flight:
                self._take_in(self._device.arrival(), time.thread_time())
            self._attached.attend(self._device, self._tables)
            self._device.release(keep)

    def restore(self) -> None:
        """Takes the memory again that `release` gave back; nothing is compiled.

        Raises:
          RuntimeError: nothing was released; or there is no memory: then call it again, nothing is lost.
        """
        with self._consumer, uninterrupted(), self._lock:
            if not self._device.restore():
                self._begin()

    def lower(self) -> jax.stages.Lowered:
        """Lowers the engine's program, to be compiled ahead or looked into; runs nothing.

        Returns:
          The only program that it has, whatever its requests; `.compile()` says how much memory it takes.
        """
        return self._device.lower(self._inboxes())

    def _begin(self) -> None:
        """Makes a new state, and tells it of all requests that have not ended."""
        self._device.begin_again(self._delivery.counters())
        self._delivery.begin_again(self.clock())
        self._attached.is_new = True
        _ = self._device.state

    def _set_weights(self, namespace: ArrayLike | None) -> None:
        self._weights = one_namespace(namespace)
        for table in self._tables:
            table.set_weights(self._weights)

    def _has_news(self) -> bool:
        return bool(self._delivery.events or self.num_unfinished or self._device.num_in_flight)

    def _compile(self) -> None:
        """Compiles the program before the first dispatch: within `_dispatch` all pushes would wait for it."""
        if not self._is_compiled:
            self._device.compile(self._inboxes())
            self._is_compiled = True

    def _inboxes(self) -> list[Inbox]:
        with self._lock:  # not while the program is compiled, for pushes wait for it
            return [table.pack(False).inbox for table in self._tables]

    def _dispatch(self, length: Length) -> None:
        parcels = [table.pack(self._has_new_weights) for table in self._tables]
        self._device.launch([parcel.inbox for parcel in parcels], length, self._pace.ticks(self.clock()))
        # If that raised, nothing was told to the device, and all of it is told again.
        self._has_new_weights, self._attached.is_new = False, True
        for table, parcel in zip(self._tables, parcels, strict=True):
            table.mark_sent(parcel)
        if self._attached.has_answer:
            self._hear_answer()

    def _hear_answer(self) -> None:
        """Ends what is under way, if a row is free; takes no lock, for threads that the loop may wait for."""
        if sum(len(table) - table.num_to_send for table in self._tables) < self._num_rows:
            self._pace.note_news(time.monotonic(), is_awaited=True)

    def _end_late(self) -> float:
        """Ends requests whose deadline has passed, and returns the seconds until the next one."""
        with self._lock:
            has_ended, until_next = self._delivery.end_late(self.clock())
            if has_ended:
                self._pace.note_news(time.monotonic(), is_awaited=True)
            return until_next

    def _take_in(self, arrival: Arrival, begun_s: float) -> None:
        """Takes in the reports of all shards; the host's work for them began at `begun_s` of its thread."""
        now = self.clock()
        begun_at = now - (arrival.at - arrival.begun_at)
        self._device.drop(arrival)
        num_steps, has_news = self._delivery.take_in(arrival.reports, begun_at, now)
        stopped = any(table.num_to_end for table in self._tables)  # by stop strings: others are told by now
        if has_news or stopped:
            self._pace.note_news(arrival.at, is_awaited=stopped)
        host_s = time.thread_time() - begun_s  # waiting takes none
        self._pace.note(arrival.at, host_s, num_steps, arrival.device_s)
