"""Partial rollouts: an engine goes on drawing while the trainer trains, and rows go on under new weights.

A group is a request of `G` samples: its prompt is computed once and forked. Enough groups that have ended
are a batch; the engine gets the new parameters between two dispatches, and no row is lost or begun again.
"""

from collections import deque
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.rollouts.sampling import BLOCK_SIZE, Rollouts
from experiments.rollouts.task import MAX_ANSWER, MAX_PROMPT, STOP, Prompts, questions
from models.decoder import Decoder, cache_config, forward

STEPS_PER_DISPATCH = 2  # fewer than an answer has tokens


class Group:
    """The answers to one question, as far as they have come.

    Attributes:
      question: Prompts of one row.
      tokens: i32[G, MAX_ANSWER]; 0 where there is none.
      logprobs: f32[G, MAX_ANSWER], likewise.
      version: i32[G, MAX_ANSWER], updates that the engine knew of when the token was drawn; -1 for none.
      num_tokens: i32[G].
      num_ended: Answers that are whole.
    """

    def __init__(self, question: Prompts, size: int):
        self.question, shape = question, (size, MAX_ANSWER)
        self.tokens, self.logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.version = np.full(shape, -1, np.int32)
        self.num_tokens, self.num_ended = np.zeros(size, np.int32), 0

    def add(self, event: kv.engine.TokenEvent, version: int) -> None:
        """Takes in what the engine said of one answer."""
        i, begin = event.sample_id, self.num_tokens[event.sample_id]
        new = slice(begin, begin + len(event.tokens))
        self.tokens[i, new], self.logprobs[i, new] = event.tokens, event.logprobs
        self.version[i, new] = version
        self.num_tokens[i] += len(event.tokens)
        if event.finish_reason is not None:
            if event.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"question {event.id} ended by {event.finish_reason!r}")
            self.num_ended += 1


class Batch(NamedTuple):
    """Groups that have ended: prompts of `n` rows, rollouts and versions (see `Group`) of `n * G`."""

    prompts: Prompts
    rollouts: Rollouts
    version: np.ndarray
    ids: list[int]

    @property
    def num_partial(self) -> int:
        """Answers that were drawn under more than one set of weights."""
        oldest = np.where(self.version < 0, self.version.max(), self.version).min(axis=1)
        return int((oldest < self.version.max(axis=1)).sum())


class Sampler:
    """An engine that is never out of questions; at any time `num_ahead` are asked and not answered."""

    def __init__(self, decoder: Decoder, seed: int, group_size: int, num_rows: int, num_ahead: int):
        longest, num_samples = MAX_PROMPT + MAX_ANSWER, num_ahead * group_size
        sizes = dict(block_size=BLOCK_SIZE, max_seqs=num_rows, max_seq_len=longest)
        config = cache_config(decoder.config, **sizes, enable_prefix_caching=True)
        limits = kv.engine.Limits(num_samples, max_tokens=num_samples * longest)
        options: Any = dict(steps_per_dispatch=STEPS_PER_DISPATCH, limits=limits)
        self.engine = kv.Engine(forward, decoder, config, **options)
        self.num_asked, self.num_prompt_tokens = 0, 0
        self._seed, self._group_size, self._num_ahead = seed, group_size, num_ahead
        self._open: dict[Any, Group] = {}
        self._ended: deque[Any] = deque()

    def collect(self, num_groups: int) -> Batch:
        while len(self._ended) < num_groups:
            self._ask()
            self.engine.drain()
            # Of the dispatch whose report was read, which may be older than what `set_params` was told last.
            version = self.engine.figures().counts[kv.engine.Counter.UPDATES]
            for event in self.engine.take_events():
                group = self._open[event.id]
                group.add(event, version)
                if group.num_ended == self._group_size:
                    self._ended.append(event.id)
        ids = [self._ended.popleft() for _ in range(num_groups)]
        groups = [self._open.pop(i) for i in ids]
        tokens, logprobs, version, num_tokens = (
            np.concatenate([getattr(group, name) for group in groups])
            for name in ("tokens", "logprobs", "version", "num_tokens")
        )
        mask = np.arange(MAX_ANSWER) < num_tokens[:, None]
        prompts = Prompts(*map(np.concatenate, zip(*(group.question for group in groups), strict=True)))
        return Batch(prompts, Rollouts(*map(jnp.asarray, (tokens, logprobs, mask))), version, ids)

    def _ask(self) -> None:
        while len(self._open) - len(self._ended) < self._num_ahead:
            question = questions(np.random.default_rng([self._seed, 1, self.num_asked]), 1)
            request = kv.GenerationRequest(
                np.asarray(question.tokens)[0, : int(question.length[0])],
                MAX_ANSWER,
                id=self.num_asked,
                sampling=kv.decoding.SamplingParams(temperature=1.0, seed=self._seed + self.num_asked),
                stop_tokens=[STOP],
                num_samples=self._group_size,
            )
            if not self.engine.push([request]):
                return
            self._open[self.num_asked] = Group(question, self._group_size)
            self.num_asked += 1
            self.num_prompt_tokens += int(question.length[0]) - 1  # the last is computed with the answer
