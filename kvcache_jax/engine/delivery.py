"""Delivery of reports: events for the consumer, counts, and the times of each request."""

import math
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.engine.events import EngineFigures, TokenEvent
from kvcache_jax.engine.metrics import Metrics
from kvcache_jax.engine.program import HEADER_LEN, Report
from kvcache_jax.engine.state import NO_TOKEN, NUM_COLUMNS, OF_PROMPT, EngineCounter, Finish
from kvcache_jax.engine.stop_text import Said
from kvcache_jax.engine.table import RequestTable, Sample


class Delivery:
    """Takes in the reports of all shards, for tables of requests.

    Args:
      tables: A shard's each.
      config: Of a shard's cache.
      num_slots: Of a table.
      width: Of an entry of the outbox.

    Attributes:
      events: Those that no consumer has received yet.
      metrics: Of all requests so far.
    """

    def __init__(self, tables: Sequence[RequestTable], config: CacheConfig, num_slots: int, width: int):
        self.events: deque[TokenEvent] = deque()
        self.metrics = Metrics(config.prefix_unit if config.enable_prefix_caching else None)
        self._error: Exception | None = None  # the first one of a caller's `detokenize`
        self._tables, self._width = tables, width
        self._rows_end = HEADER_LEN + config.max_seqs
        self._outbox = self._rows_end + num_slots
        self.forget_rows()
        self._counts = [dict.fromkeys(EngineCounter, 0) for _ in tables]

    def take_in(self, reports: np.ndarray, begun_at: float, now: float) -> tuple[int, bool]:
        """Takes in the reports i32[shards, any] of a dispatch that began then, and arrived now.

        Returns its steps, and whether a request got its first token or ended. All of it is taken in before an
        error of a caller's function is raised.
        """
        num_steps, has_news = 0, False
        for shard, (report, table) in enumerate(zip(reports, self._tables, strict=True)):
            num_steps = max(num_steps, self._count(self._counts[shard], report))
            self._note_starts(table, report, self._reports[shard], begun_at)
            has_news |= self._deliver(table, report, begun_at, now)
        self._reports = reports
        error, self._error = self._error, None
        if error is not None:
            raise error
        return num_steps, has_news

    def _count(self, counts: dict[EngineCounter, int], report: np.ndarray) -> int:
        """Brings counts, which only grow, up to a report's counters modulo 2**32, and returns the steps."""
        before = counts[EngineCounter.STEPS]
        counters = report[len(Report) : HEADER_LEN].view(np.uint32).tolist()
        for counter in EngineCounter:
            counts[counter] += (counters[counter] - counts[counter]) % 2**32
        return counts[EngineCounter.STEPS] - before

    def _note_starts(
        self, table: RequestTable, report: np.ndarray, before: np.ndarray, begun_at: float
    ) -> None:
        rows, old = (x[HEADER_LEN : self._rows_end] for x in (report, before))
        for slot in rows[rows != old].tolist():
            sample = table.get(slot)
            if sample is not None and sample.started_at is None:
                sample.started_at = begun_at

    def _deliver(self, table: RequestTable, report: np.ndarray, begun_at: float, now: float) -> bool:
        """Makes an event of each continuation's entries; those that ended leave the table."""
        entries = report[self._outbox :].reshape(-1, self._width)[: report[Report.OUTBOX_LEN]]
        if not len(entries):
            return False
        is_of_prompt = entries[:, 4] == OF_PROMPT
        if is_of_prompt.any():
            _note_prompts(table, entries[is_of_prompt])
            entries = entries[~is_of_prompt]
        order = np.argsort(entries[:, 0], kind="stable")
        entries = entries[order]
        begins = np.flatnonzero(np.diff(entries[:, 0], prepend=-1))
        ends = np.append(begins[1:], len(entries))
        slots, uids, tokens = (entries[:, i].tolist() for i in range(3))
        logprobs, tops, has_news = _floats(entries[:, 3]), _top_logprobs(entries), False
        num_cached = report[self._rows_end : self._outbox]
        for k in np.argsort(order[begins]).tolist():
            begin, end = begins[k].item(), ends[k].item()
            sample, reason = table.find(slots[begin], uids[begin]), Finish(entries[end - 1, 4].item())
            end -= tokens[end - 1] == NO_TOKEN  # an end that no token comes with
            has_news |= reason != Finish.NOT_YET or sample.first_at is None
            if sample.started_at is None and end > begin:
                sample.started_at = begun_at
            if num_cached[sample.slot] >= 0 and sample.num_cached is None:
                sample.num_cached = num_cached[sample.slot].item()
                self._note_start(table, sample)
            if not sample.has_stopped:
                self._tell(sample, reason, now, tokens[begin:end], logprobs[begin:end], tops[begin:end])
            if reason != Finish.NOT_YET:
                self._note_end(table, sample, reason)
                table.remove(sample)
            elif sample.has_stopped:
                table.end(sample, Finish.STOP)
        return has_news

    def _note_start(self, table: RequestTable, sample: Sample) -> None:
        """Counts the misses of a sample's prompt, once it has its first token."""
        sample.published_in = table.namespace_of(sample).tobytes()
        request = sample.request
        if not request.prompt_logprobs:  # which the cache does not serve
            self.metrics.misses.note_start(
                request.conversation and request.conversation.name,
                np.asarray(request.prompt),
                sample.published_in,
                self._tables.index(table),
                sample.num_cached or 0,
            )

    def _note_end(self, table: RequestTable, sample: Sample, reason: Finish) -> None:
        """Notes what a sample leaves in the cache: all but its last token, if its logits were numbers."""
        if sample.tokens and reason != Finish.NAN_LOGITS:
            namespace = sample.published_in or table.namespace_of(sample).tobytes()
            conversation = sample.request.conversation
            self.metrics.misses.note_end(
                conversation and conversation.name, sample.known[:-1], namespace, self._tables.index(table)
            )

    def _tell(
        self,
        sample: Sample,
        reason: Finish,
        now: float,
        tokens: list[int],
        logprobs: list[float],
        tops: list[dict[int, float]],
    ) -> None:
        has_ended, text = reason != Finish.NOT_YET, None
        sample.tokens += tokens
        if sample.text is not None:
            stop, said = Finish.STOP, Said([[], [], []], "", True)
            try:
                said = sample.text.add((tokens, logprobs, tops), has_ended)
            except Exception as error:
                stop, self._error = Finish.CANCELLED, self._error or error
            if sample.has_stopped:  # its own function has cancelled it, and its end is told
                return
            (tokens, logprobs, tops), text, sample.has_stopped = said
            if sample.has_stopped:
                reason, has_ended = stop, True
            if not (tokens or text or has_ended):
                return
        self.metrics.note_tokens(sample, len(tokens), now)
        sample.num_told += len(tokens)
        if tokens:
            sample.first_at = now if sample.first_at is None else sample.first_at
            sample.told_at = now
        if (most := sample.request.num_top_logprobs) is not None:
            tops = [dict([*top.items()][:most]) for top in tops] if most else []
        of_prompt, sample.prompt_logprobs = sample.prompt_logprobs, None
        if has_ended:
            self.metrics.note_end(sample, reason.name.lower(), now)
        to_first = None if sample.first_at is None else sample.first_at - sample.pushed_at
        self.events.append(
            TokenEvent(
                id=sample.id,
                sample_id=sample.sample_id,
                tokens=tokens,
                logprobs=logprobs,
                top_logprobs=tops,
                finish_reason=reason.name.lower() if has_ended else None,
                text=text,
                prompt_logprobs=None if of_prompt is None else of_prompt.tolist(),
                num_cached_tokens=sample.num_cached if has_ended else None,
                time_queued=sample.time_queued(now) if has_ended else None,
                time_to_first_token=to_first if has_ended else None,
            )
        )

    def cancel(self, request_id: Hashable, now: float) -> bool:
        """Ends the samples of a request; False if there are none."""
        found = [(table, sample) for table in self._tables for sample in table.samples_of(request_id)]
        for table, sample in found:
            table.end(sample, Finish.CANCELLED)
            self._tell_end(sample, Finish.CANCELLED, now)
        return bool(found)

    def end_late(self, now: float) -> tuple[bool, float]:
        """Ends samples whose deadline has passed; returns if there were any, and the seconds to the next."""
        has_ended, until_next = False, math.inf
        for table in self._tables:
            for ends_at, sample in table.deadlines():
                if ends_at > now:
                    until_next = min(until_next, ends_at - now)
                    continue
                table.end(sample, Finish.DEADLINE)
                self._tell_end(sample, Finish.DEADLINE, now)
                has_ended = True
        return has_ended, until_next

    def _tell_end(self, sample: Sample, reason: Finish, now: float) -> None:
        """Tells the end of a sample, of which the consumer is told no more that the device may say."""
        if not sample.has_stopped:
            self._tell(sample, reason, now, [], [], [])
            sample.has_stopped = True

    def counters(self) -> np.ndarray:
        """Returns the counts as a device counts them, u32[shards, len(EngineCounter)]."""
        return np.array(
            [[counts[name] % 2**32 for name in EngineCounter] for counts in self._counts], np.uint32
        )

    def begin_again(self, now: float) -> None:
        """Tells a new state of all samples, and ends those that were to end."""
        self.forget_rows()
        self.metrics.misses.note_reset()
        for table in self._tables:
            for sample, reason in table.send_again():
                self._tell_end(sample, reason, now)

    def forget_rows(self) -> None:
        """Hears that no request runs."""
        self._reports = np.zeros((len(self._tables), self._outbox), np.int32)
        self._reports[:, HEADER_LEN:] = -1

    def figures(self, num_reads: int) -> EngineFigures:
        """Makes the figures of the latest reports."""
        header = self._reports[:, : len(Report)].sum(axis=0).tolist()
        num_to_send = sum(table.num_to_send for table in self._tables)
        return EngineFigures(
            running=header[Report.RUNNING],
            waiting=header[Report.WAITING] + num_to_send,
            blocks_used=header[Report.BLOCKS_USED],
            blocks_cached=header[Report.BLOCKS_CACHED],
            blocks_free=header[Report.BLOCKS_FREE],
            counts={name: sum(counts[name] for counts in self._counts) for name in EngineCounter},
            num_reads=num_reads,
        )


def _note_prompts(table: RequestTable, entries: np.ndarray) -> None:
    """Keeps log-probabilities of prompts by their places, for rows may compute them twice."""
    for slot in np.unique(entries[:, 0]).tolist():
        own = entries[entries[:, 0] == slot]
        sample = table.find(slot, own[0, 1].item())
        if sample.prompt_logprobs is None:
            sample.prompt_logprobs = np.full(len(sample.request.prompt) - 1, np.nan, np.float32)
        sample.prompt_logprobs[own[:, 2] - 1] = np.ascontiguousarray(own[:, 3]).view(np.float32)


def _top_logprobs(entries: np.ndarray) -> list[dict[int, float]]:
    tops = entries[:, NUM_COLUMNS:]
    num_tops = tops.shape[1] // 2
    if not num_tops:
        return []
    pairs = zip(tops[:, :num_tops].tolist(), _floats(tops[:, num_tops:]), strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]


def _floats(bits: np.ndarray) -> list:
    return np.ascontiguousarray(bits).view(np.float32).tolist()
