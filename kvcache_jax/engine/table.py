"""The host's side of the request table: the slot and the run of tokens of each request.

A slot and its run are taken when a request is pushed and released when the host has read that it ended, so
the device never reuses a slot or run of a request that the host still knows.
"""

import bisect
import dataclasses
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.engine.inputs import PARTS, check_inputs
from kvcache_jax.engine.program import Inbox
from kvcache_jax.engine.requests import (
    GenerationRequest,
    TableSizes,
    empty_requests,
    one_namespace,
    sample_seed,
)
from kvcache_jax.engine.seen_prefixes import SeenPrefixes
from kvcache_jax.engine.state import Finish
from kvcache_jax.engine.stop_text import StopText
from kvcache_jax.prefix.names import namespace_within

_MOST_SAMPLES = 2**31 - 2
"""As many as i32 tells apart, besides -1 and the number that stands for none."""


@dataclasses.dataclass
class Sample:
    """One continuation of a request that has not ended, as the host knows it."""

    request: GenerationRequest
    id: Hashable  # its name in results
    sample_id: int  # index among the request's samples
    uid: int  # number in the order of arrival
    slot: int  # in the table
    run: tuple[int, int]  # first token and length of its run in the buffer of tokens
    parent: "Sample | None"  # the request's first sample; None for that one
    ends_at: float | None  # on the host's clock; None for no deadline
    pushed_at: float
    num_to_ask: int = 0  # attachments that have not answered yet what they have of its prompt
    is_sent: bool = False  # the device knows of it
    ending: Finish | None = None  # why the device was told to end it
    tokens: list[int] = dataclasses.field(default_factory=list)  # that the device told, after the prompt
    num_told: int = 0  # of these, to the consumer
    # When it first had a row, and when its first and its latest tokens came, all on the host's clock.
    started_at: float | None = None
    first_at: float | None = None
    told_at: float | None = None
    num_cached: int | None = None  # first tokens that the cache had when it was admitted
    published_in: bytes | None = None  # the namespace then
    prompt_logprobs: np.ndarray | None = None  # f32[prompt_len - 1], until they are told
    text: StopText | None = None
    has_stopped: bool = (
        False  # by a stop string, or ended by the host: its consumer knows, and the device will
    )

    @property
    def known(self) -> np.ndarray:
        """i32[any], its prompt and the tokens that were told."""
        prompt = np.asarray(self.request.prompt)
        return np.append(prompt, np.array(self.tokens, np.int32)) if self.tokens else prompt

    @property
    def is_ready(self) -> bool:
        """Whether the device may know of it, and of its parent."""
        return not (self.parent or self).num_to_ask

    def time_queued(self, now: float) -> float:
        """Seconds without a row, until now if it has had none."""
        return (now if self.started_at is None else self.started_at) - self.pushed_at


class Parcel(NamedTuple):
    """An inbox, and the number of the table's news in it."""

    inbox: Inbox
    samples: Sequence[Sample]  # those that the device has not heard of
    num_ends: int  # ends that it has not heard of, the first ones


class TokenRuns:
    """Free runs of a buffer, the first one that is long enough is taken; neighbours join when released."""

    def __init__(self, num_tokens: int):
        self._starts, self._lens = [0], [num_tokens]

    def take(self, num_tokens: int) -> int | None:
        """Takes a run and returns its start; None where no free run is as long."""
        for i, length in enumerate(self._lens):
            if length >= num_tokens:
                start = self._starts[i]
                if length == num_tokens:
                    del self._starts[i], self._lens[i]
                else:
                    self._starts[i], self._lens[i] = start + num_tokens, length - num_tokens
                return start
        return None

    def give_back(self, start: int, num_tokens: int) -> None:
        """Releases a run that was taken."""
        if num_tokens == 0:
            return
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and start + num_tokens == self._starts[i]:
            num_tokens += self._lens[i]
            del self._starts[i], self._lens[i]
        if i > 0 and self._starts[i - 1] + self._lens[i - 1] == start:
            self._lens[i - 1] += num_tokens
        else:
            self._starts.insert(i, start)
            self._lens.insert(i, num_tokens)

    @property
    def num_free(self) -> int:
        """Tokens of all free runs."""
        return sum(self._lens)


class RequestTable:
    """The samples that have not ended, by slot, and the news of them that the device has yet to be told.

    An inbox ends at most `most_ended` of them. Of several tables each knows which prompts it was given.

    Attributes:
      num_attached: Attachments that are asked about a prompt before it is sent.
    """

    def __init__(
        self,
        sizes: TableSizes,
        inbox_sizes: TableSizes,
        most_ended: int,
        config: CacheConfig,
        num_tables: int = 1,
    ):
        self._sizes, self._inbox_sizes, self._most_ended = sizes, inbox_sizes, most_ended
        self._max_seq_len, self.num_attached = config.max_seq_len, 0
        self._seen = SeenPrefixes(config) if num_tables > 1 else None
        self._free_slots = deque(range(sizes.num_slots))
        self._runs = TokenRuns(sizes.num_tokens)
        self._weights = np.zeros(4, np.uint32)
        self._namespaces = np.zeros((sizes.num_slots, 4), np.uint32)
        self._by_slot: dict[int, Sample] = {}
        self._by_id: dict[Hashable, list[Sample]] = {}
        self._to_send: deque[Sample] = deque()
        self._to_end: deque[tuple[Sample, Finish]] = deque()
        self._next_uid = 0
        self._quiet: Inbox | None = None  # without news, under the present namespaces

    def __len__(self) -> int:
        return len(self._by_slot)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sample]:
        return iter(list(self._by_slot.values()))

    def samples_of(self, request_id: Hashable) -> list[Sample]:
        """Finds the samples of a request that have not ended."""
        return list(self._by_id.get(request_id, ()))

    def add(self, request: GenerationRequest, request_id: Hashable, now: float) -> bool:
        """Takes slots and runs for all samples of a request; False, and nothing taken, without room."""
        # No token is stored of a request that the device will refuse.
        is_long = request.num_tokens - 1 > self._max_seq_len
        run_len = 0 if is_long else request.num_tokens
        if len(self._free_slots) < request.num_samples:
            return False
        runs: list[int] = []
        for _ in range(request.num_samples):
            start = self._runs.take(run_len) if run_len else 0
            if start is None:
                for taken in runs:
                    self._runs.give_back(taken, run_len)
                return False
            runs.append(start)
        ends_at = None if request.deadline is None else now + request.deadline
        first = None
        for sample_id, start in enumerate(runs):
            slot, uid = self._free_slots.popleft(), self._next_uid
            self._next_uid += 1
            run = start, run_len
            sample = Sample(request, request_id, sample_id, uid, slot, run, first, ends_at, pushed_at=now)
            first = first or sample
            if request.stop_strings is not None:
                sample.text = StopText(request.stop_strings)
            if request.prompt_logprobs and sample.parent is None and len(request.prompt) == 1:
                sample.prompt_logprobs = np.zeros(0, np.float32)  # the device reports none
            self._by_slot[slot] = sample
            self._namespaces[slot] = self._namespace_of(request)
            self._by_id.setdefault(request_id, []).append(sample)
            self._to_send.append(sample)
            self._ask(sample)
        if self._seen is not None:
            self._seen.add(self._namespace_of(request), np.asarray(request.prompt, np.int32))
        self._quiet = None
        return True

    def deadlines(self) -> list[tuple[float, Sample]]:
        """Lists the deadlines of samples that have not ended, on the host's clock."""
        return [
            (sample.ends_at, sample)
            for sample in self._by_slot.values()
            if sample.ends_at is not None and not sample.has_stopped
        ]

    def load_with(self, request: GenerationRequest) -> int:
        """Counts the tokens of all samples, less what the cache may have of a request's prompt."""
        if self._seen is None:
            return self.num_tokens
        prompt = np.asarray(request.prompt, np.int32)
        return self.num_tokens - self._seen.num_tokens(self._namespace_of(request), prompt)

    def _ask(self, sample: Sample) -> None:
        # A prompt that is computed whole, or never, needs nothing of anyone.
        is_asked = sample.parent is None and not sample.request.prompt_logprobs and sample.run[1]
        sample.num_to_ask = self.num_attached if is_asked else 0

    def asking(self) -> Iterator[Sample]:
        """Yields the samples about whose prompts attachments are still asked."""
        return (sample for sample in self._to_send if sample.num_to_ask)

    def namespace_of(self, sample: Sample) -> np.ndarray:
        """Returns the namespace u32[4] of a sample, within the weights'."""
        return self._namespaces[sample.slot]

    @property
    def has_work(self) -> bool:
        """Whether the device knows of a sample, or may be told of one."""
        return len(self._by_slot) > len(self._to_send) or any(sample.is_ready for sample in self._to_send)

    def set_weights(self, namespace: np.ndarray) -> None:
        """Sets the namespace u32[4] of the weights, within which all samples have theirs from now on."""
        self._weights, self._quiet = namespace, None
        for slot, sample in self._by_slot.items():
            self._namespaces[slot] = self._namespace_of(sample.request)

    def _namespace_of(self, request: GenerationRequest) -> np.ndarray:
        """Finds the namespace u32[4] of a request under the present weights."""
        words = namespace_within(self._weights, one_namespace(request.namespace))
        return self._sizes.parts.namespace(words) if PARTS in request.inputs else words

    def end(self, sample: Sample, reason: Finish) -> None:
        """Ends a sample, whose id may be another request's from now on; the device keeps its slot a while."""
        if not sample.is_sent:
            self._to_send.remove(sample)
            self.remove(sample)
        elif sample.ending is None:
            self._forget_id(sample)
            sample.ending = reason
            self._to_end.append((sample, reason))

    def send_again(self) -> list[tuple[Sample, Finish]]:
        """Tells all samples to a device that knows of none; removes and returns those that were to end."""
        self._to_end.clear()
        if self._seen is not None:
            self._seen.clear()
        samples = sorted(self, key=lambda sample: sample.uid)
        ended = [(sample, sample.ending) for sample in samples if sample.ending is not None]
        for sample, _ in ended:
            self.remove(sample)
        self._to_send = deque(sample for sample in samples if sample.ending is None)
        for sample in self._to_send:
            sample.is_sent = False
            self._ask(sample)
        return ended

    def get(self, slot: int) -> Sample | None:
        """Finds the sample of a slot; None for one without."""
        return self._by_slot.get(slot)

    def find(self, slot: int, uid: int) -> Sample:
        """Finds the sample that the device speaks of."""
        sample = self._by_slot[slot]
        assert sample.uid == uid
        return sample

    def remove(self, sample: Sample) -> None:
        """Releases the slot and the run of a sample that ended."""
        del self._by_slot[sample.slot]
        if sample.ending is None:
            self._forget_id(sample)
        self._free_slots.append(sample.slot)
        self._runs.give_back(*sample.run)

    def _forget_id(self, sample: Sample) -> None:
        self._by_id[sample.id].remove(sample)
        if not self._by_id[sample.id]:
            del self._by_id[sample.id]

    def pack(self, has_new_weights: bool) -> Parcel:
        """Packs the news that the device is told next, as much as one inbox takes.

        Only `mark_sent` takes them away, so that nothing is lost with an inbox that could not be handed over.
        Without news the inbox is the same object each time.
        """
        ready = [sample for sample in self._to_send if sample.is_ready]
        if ready or self._to_end or has_new_weights:
            return self._packed(ready, has_new_weights)
        self._quiet = self._quiet or self._packed([], False).inbox
        return Parcel(self._quiet, (), 0)

    def _packed(self, ready: Sequence[Sample], has_new_weights: bool) -> Parcel:
        sizes = self._inbox_sizes
        columns = empty_requests(sizes)
        slots = np.full(sizes.num_slots, self._sizes.num_slots, np.int32)
        parents = slots.copy()
        places = np.full(sizes.num_tokens, self._sizes.num_tokens, np.int32)
        num_generated = np.zeros_like(slots)
        num_sent = num_tokens = 0
        for sample in ready[: sizes.num_slots]:
            known = sample.known if sample.run[1] else sample.known[:0]
            if num_sent and sample.parent is None:  # samples go together, where an inbox takes them all
                is_full = num_sent + sample.request.num_samples > sizes.num_slots
                is_full |= num_tokens + sample.request.num_samples * len(known) > sizes.num_tokens
                if is_full:
                    break
            if num_tokens + len(known) > sizes.num_tokens:
                break
            slots[num_sent] = sample.slot
            _write(columns, num_sent, sample, sizes, self._max_seq_len)
            if sample.parent is not None:
                parents[num_sent] = sample.parent.slot
            columns.tokens[num_tokens : num_tokens + len(known)] = known  # type: ignore
            places[num_tokens : num_tokens + len(known)] = sample.run[0] + np.arange(len(known))
            num_generated[num_sent] = len(sample.tokens)
            num_sent, num_tokens = num_sent + 1, num_tokens + len(known)
        ended = np.full(self._most_ended, self._sizes.num_slots, np.int32)
        ended_uid, reason = np.full_like(ended, -1), np.zeros_like(ended)
        num_ends = min(len(self._to_end), self._most_ended)
        for i, (sample, why) in enumerate(itertools.islice(self._to_end, num_ends)):
            ended[i], ended_uid[i], reason[i] = sample.slot, sample.uid, why
        namespaces = self._namespaces.copy()  # a program may read it later
        news: dict[str, Any] = dict(
            slots=slots,
            requests=dataclasses.replace(columns, parent=parents, namespace=namespaces),
            places=places,
            ended=ended,
            ended_uid=ended_uid,
            reason=reason,
            num_generated=num_generated,
            has_new_weights=np.bool_(has_new_weights),
        )
        return Parcel(Inbox(**news), ready[:num_sent], num_ends)

    def mark_sent(self, parcel: Parcel) -> None:
        """Records that the device has a parcel, the latest that was packed."""
        for sample in parcel.samples:
            sample.is_sent = True
        self._to_send = deque(sample for sample in self._to_send if not sample.is_sent)
        for _ in range(parcel.num_ends):
            self._to_end.popleft()

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, prompts and longest continuations."""
        return self._sizes.num_tokens - self._runs.num_free

    @property
    def num_left(self) -> int:
        """Samples that can still be pushed, ever: a number tells each from all others."""
        return _MOST_SAMPLES - self._next_uid

    @property
    def num_to_send(self) -> int:
        """Samples that the device has not heard of."""
        return len(self._to_send)

    @property
    def num_to_end(self) -> int:
        """Samples of whose end the device has not heard."""
        return len(self._to_end)


def _write(columns: Any, i: int, sample: Sample, sizes: TableSizes, max_seq_len: int) -> None:
    """Writes a sample into entry `i` of an inbox's columns, in numpy."""
    request = sample.request
    columns.uid[i], columns.start[i] = sample.uid, sample.run[0]
    # Enough to be refused: sums on the device stay below 2**31.
    columns.prompt_len[i] = min(len(request.prompt), max_seq_len + 1)
    columns.max_new[i] = min(request.max_new_tokens, max_seq_len + 1)
    drawn, sampling = columns.sampling, request.sampling
    drawn.temperature[i], drawn.top_k[i] = sampling.temperature, sampling.top_k
    drawn.top_p[i], drawn.min_p[i] = sampling.top_p, sampling.min_p
    drawn.seed[i] = sample_seed(sampling.seed, sample.sample_id)
    columns.stop[i, : len(request.stop_tokens)] = request.stop_tokens
    columns.priority[i], columns.client[i] = request.priority, request.client_id
    columns.turn.conversation[i], columns.turn.retain[i] = request.turn
    if sample.parent is not None:
        columns.parent_uid[i] = sample.parent.uid
    columns.wants_prompt[i] = request.prompt_logprobs and sample.parent is None
    for name, column in columns.inputs.items():
        column[i] = request.inputs.get(name, 0)
    for k, item in enumerate(request.items):
        columns.items[i, k] = item
    if sizes.spans is not None and PARTS in request.inputs:
        columns.keeps_end[i] = sizes.parts.keeps_ends
        for k, span in enumerate(sizes.spans(request)):
            columns.parts[i, k] = span


def checked_ids(
    requests: list[Any], tables: Sequence[RequestTable], sizes: TableSizes, max_seq_len: int
) -> set[Hashable]:
    """Refuses anything but requests that fit, and returns the ids that they name."""
    ids = set[Hashable]()
    for request in requests:
        if not isinstance(request, GenerationRequest):
            raise TypeError(f"requests has a {type(request).__name__}, expected GenerationRequests")
        if request.id is not None and (request.id in ids or any(request.id in table for table in tables)):
            raise ValueError(
                f"requests has the id {request.id!r}, which another request has that has not ended, "
                "expected one of its own, or none"
            )
        ids.add(request.id)
        check_fits(request, sizes, max_seq_len)
    num_left = min(table.num_left for table in tables)
    if sum(request.num_samples for request in requests) > num_left:
        raise ValueError(
            f"got {len(requests)} requests and this engine can number {num_left} more samples, expected "
            "fewer: make another Engine, and push them there"
        )
    return ids


def check_fits(request: GenerationRequest, sizes: TableSizes, max_seq_len: int) -> None:
    """Refuses a request that has more of something than the table takes of any."""
    inputs = dict(request.inputs)
    if sizes.spans is not None and PARTS in inputs:
        del inputs[PARTS]
        sizes.spans(request)
    for what, value, most, name in (
        ("stop tokens", len(request.stop_tokens), sizes.num_stops, "max_stop_tokens"),
        ("items", len(request.items), sizes.num_items, "max_items"),
        ("samples", request.num_samples, sizes.num_slots, "max_requests"),
        ("as its client", request.client_id, sizes.num_clients - 1, "num_clients"),
    ):
        if value > most:
            raise ValueError(
                f"a request has {value} {what}, expected at most {most}: make the Engine with a larger "
                f"{name} in its kv.engine.Limits"
            )
    if (conversation := request.conversation) and conversation.retain and not sizes.hears_turns:
        raise ValueError(
            f"a request has retain = {conversation.retain} and the engine's cache retains nothing, expected "
            'CacheConfig(extras=[kv.policies.Conversations()], eviction_policy="retention")'
        )
    if (request.num_top_logprobs or 0) > sizes.num_tops:
        raise ValueError(
            f"a request has num_top_logprobs = {request.num_top_logprobs}, expected at most "
            f"{sizes.num_tops}: make the Engine with a larger one"
        )
    if request.prompt_logprobs and not sizes.prompt_logprobs:
        raise ValueError(
            "a request has prompt_logprobs=True, expected an Engine made for them: limits=kv.engine.Limits("
            "prompt_logprobs=True)"
        )
    check_inputs(inputs, sizes.inputs)
    # No token is stored of a request that the device will refuse.
    is_long = request.num_tokens - 1 > max_seq_len
    num_tokens = 0 if is_long else request.num_samples * request.num_tokens
    if num_tokens > sizes.num_tokens:
        raise ValueError(
            f"a request has {num_tokens} tokens in {request.num_samples} samples, expected at most "
            f"{sizes.num_tokens}: make the Engine with a larger max_tokens in its kv.engine.Limits"
        )
