"""What is measured: two ways to train, and what it saves that a group computes its prompt once."""

import concurrent.futures
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvcache_jax as kv
from experiments.rollouts.partial import Sampler
from experiments.rollouts.sampling import cache_sizes, without_sharing
from experiments.rollouts.task import Prompts, questions
from experiments.rollouts.training import (
    Metrics,
    improve,
    make_optimizer,
    train_step,
)
from models.decoder import Decoder

WINDOW = 20  # updates that a reward is the mean of, at the beginning and at the end
NUM_ROUNDS = 7
OPTIMIZER = make_optimizer()


class Sizes(NamedTuple):
    """Numbers that a training is made of: questions of an update, answers to each, updates."""

    prompts: int
    group: int
    updates: int
    seed: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    def batch(self, update: int) -> Prompts:
        return questions(np.random.default_rng([self.seed, 2, update]), self.prompts)


class Steps(NamedTuple):
    """A whole step as compiled programs: a group computes its prompt once, or each answer its own."""

    shared: jax.stages.Compiled
    apart: jax.stages.Compiled


def compile_steps(decoder: Decoder, sizes: Sizes) -> Steps:
    """Compiles both for these sizes, at the same time."""
    state, prompts, key = OPTIMIZER.init(decoder), sizes.batch(0), jax.random.key(0)  # type: ignore
    options = dict(optimizer=OPTIMIZER, group_size=sizes.group)
    lowered = [
        train_step.lower(decoder, state, prompts, key, **options, is_shared=is_shared)
        for is_shared in (True, False)
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return Steps(*pool.map(lambda program: program.compile(), lowered))


def train_in_step(decoder: Decoder, sizes: Sizes, steps: Steps) -> dict[str, Any]:
    """Trains by whole steps: everything between questions and new parameters is one program."""
    state, found, start = OPTIMIZER.init(decoder), [], time.perf_counter()  # type: ignore
    for update in range(sizes.updates):
        key = jax.random.fold_in(jax.random.key(sizes.seed), update)
        decoder, state, metrics, _ = steps.shared(decoder, state, sizes.batch(update), key)
        found.append(metrics)
    curve = _curve(found)
    return {"way": "in a step", **curve, "ms": 1e3 * (time.perf_counter() - start) / sizes.updates}


def train_beside_engine(decoder: Decoder, sizes: Sizes) -> dict[str, Any]:
    """Trains by what an engine has ready, which goes on under new weights; then asks anew under the last."""
    state: Any = OPTIMIZER.init(decoder)  # type: ignore
    # Half of a batch is under way while the other half is waited for.
    sampler = Sampler(decoder, sizes.seed, sizes.group, sizes.rows // 2, 2 * sizes.prompts)
    options = dict(optimizer=OPTIMIZER, group_size=sizes.group)
    found, num_partial, ages, start = [], 0, [], 0.0
    for i in range(sizes.updates):
        batch = sampler.collect(sizes.prompts)
        decoder, state, metrics = improve(decoder, state, batch.prompts, batch.rollouts, **options)
        found.append(metrics)
        if i == 0:  # compiled
            start = time.perf_counter()
        sampler.engine.set_params(decoder)
        num_partial += batch.num_partial
        ages.append(i - int(np.where(batch.version < 0, i, batch.version).min()))
    ms = 1e3 * (time.perf_counter() - start) / max(sizes.updates - 1, 1)
    num_asked = sampler.num_asked
    while True:  # until a batch was asked, and drawn, under the last weights alone
        batch = sampler.collect(sizes.prompts)
        if min(batch.ids) >= num_asked:
            break
    counts = sampler.engine.figures().counts
    *_, last = improve(decoder, state, batch.prompts, batch.rollouts, **options)
    return {
        "way": "beside an engine",
        **_curve(found),
        "difference": float(last.difference),  # of earlier batches it is what the weights have changed
        "ms": ms,
        "partial": num_partial / (sizes.updates * sizes.rows),
        "oldest": max(ages),
        "updates": sizes.updates,
        "updates_told": counts[kv.engine.Counter.UPDATES],
        "forks": counts[kv.engine.Counter.FORKS],
        "prompt_share": counts[kv.engine.Counter.PREFILL_TOKENS] / (sizes.group * sampler.num_prompt_tokens),
    }


def compare_sharing(decoder: Decoder, sizes: Sizes, steps: Steps) -> dict[str, Any]:
    """Times a step whose groups share their prompt, and one whose answers each compute it, in turns."""
    state, key, prompts = OPTIMIZER.init(decoder), jax.random.key(sizes.seed), sizes.batch(0)  # type: ignore
    seconds: list[list[float]] = [[], []]
    answers, states = [], []
    for _ in range(NUM_ROUNDS + 1):  # the first is not counted
        answers, states = [], []
        for program, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            _, after, _, drawn = jax.block_until_ready(program(decoder, state, prompts, key))
            times.append(time.perf_counter() - start)
            answers.append(drawn)
            states.append(after)
    each = without_sharing(prompts, sizes.group)
    sides = ("shared", prompts, sizes.group), ("apart", each, 1)
    ways = [
        {
            "way": name,
            "prompt_tokens": int(np.asarray(read.length).sum()),
            "pool_bytes": kv.memory_bytes(cache_sizes(decoder.config, read, group_size)),
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,  # type: ignore
            "ms": [1e3 * x for x in times[1:]],
        }
        for (name, read, group_size), program, times in zip(sides, steps, seconds, strict=True)
    ]
    # Adam's mean of one gradient.
    shared, alone = (jax.tree.leaves(optax.tree.get(state, "mu")) for state in states)
    is_same = (answers[0].tokens == answers[1].tokens).all(axis=1)
    return {
        "ways": ways,
        "times_faster": statistics.median(ways[1]["ms"]) / statistics.median(ways[0]["ms"]),
        "same_answers": float(jnp.mean(is_same.astype(jnp.float32))),
        "gradient_difference": max(
            float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-30))
            for x, y in zip(shared, alone, strict=True)
        ),
    }


def _curve(found: list[Metrics]) -> dict[str, Any]:
    reward, difference, clipped = (np.array(x, float) for x in zip(*found, strict=True))
    window = min(WINDOW, len(reward))
    return {
        "rewards": reward.tolist(),
        "first": float(reward[:window].mean()),
        "last": float(reward[-window:].mean()),
        "difference": float(difference.max()),
        "clipped": float(clipped.mean()),
    }
