"""Group relative policy optimisation with optax: the loss, an update, and a whole step as one program.

References:
  DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (Shao et al., 2024;
  arXiv:2402.03300): an answer counts by its reward beside those of its group; here without a KL term.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.rollouts.sampling import Rollouts, roll_out, score, without_sharing
from experiments.rollouts.task import MAX_ANSWER, MAX_PROMPT, Prompts, rewards, unsorted_texts
from experiments.train import training
from experiments.train.bits_per_byte import empty_cache
from models.decoder import Decoder, DecoderConfig

CLIP = 0.2
LEARNING_RATE, WARMUP = 1e-3, 40  # steps
NUM_TEXTS = 32  # that are read in a step
CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    mlp_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_seq_len=128,
    use_qk_norm=True,
    tie_embeddings=True,
)


class Metrics(NamedTuple):
    """Figures of an update.

    Attributes:
      reward: f32[], mean of all answers.
      difference: f32[], largest between a token's log-probability when it was drawn and the trainer's.
      clipped: f32[], share of tokens whose ratio of the two was beyond the clip.
    """

    reward: jax.Array
    difference: jax.Array
    clipped: jax.Array


def advantages(reward: jax.Array, group_size: int) -> jax.Array:
    """Computes what each answer's reward f32[n * G] is above its group's mean, in the group's deviations."""
    groups = reward.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def grpo_loss(
    logprobs: jax.Array, rollouts: Rollouts, advantage: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes the clipped loss of log-probabilities f32[m, T], a mean over tokens, by advantages f32[m].

    Returns:
      f32[], and the largest difference to the sampler's log-probabilities and the share of clipped tokens.
    """
    change = jnp.where(rollouts.mask, logprobs - rollouts.logprobs, 0)
    ratio, advantage = jnp.exp(change), advantage[:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    num_tokens = jnp.sum(rollouts.mask, dtype=jnp.float32)
    is_clipped = rollouts.mask & (jnp.abs(ratio - 1) > CLIP)
    share = jnp.sum(is_clipped, dtype=jnp.float32) / num_tokens
    loss = -jnp.sum(jnp.where(rollouts.mask, gain, 0)) / num_tokens
    return loss, (jnp.abs(change).max(), share)


def gradient(decoder: Decoder, prompts: Prompts, rollouts: Rollouts, group_size: int) -> tuple[Any, Metrics]:
    """Computes the gradient by the parameters; prompts are of groups, or `without_sharing` of answers."""
    num_rows = len(rollouts.tokens)
    answer = jnp.repeat(jnp.asarray(prompts.answer), num_rows // len(prompts.answer), axis=0)
    reward = rewards(rollouts.tokens, answer)
    advantage = advantages(reward, group_size)

    def loss(decoder: Decoder) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return grpo_loss(score(decoder, prompts, rollouts), rollouts, advantage)

    grads, figures = jax.grad(loss, has_aux=True)(decoder)
    return grads, Metrics(reward.mean(), *figures)


@functools.partial(jax.jit, static_argnames=("optimizer", "group_size"))
def improve(decoder, optimizer_state, prompts, rollouts, *, optimizer, group_size):
    """Updates the parameters by answers that came from elsewhere: the parameters, the state, metrics."""
    grads, metrics = gradient(decoder, prompts, rollouts, group_size)
    changes, optimizer_state = optimizer.update(grads, optimizer_state, decoder)
    return optax.apply_updates(decoder, changes), optimizer_state, metrics


@functools.partial(jax.jit, static_argnames=("optimizer", "group_size", "is_shared"))
def train_step(decoder, optimizer_state, prompts, key, *, optimizer, group_size, is_shared=True):
    """Draws answers, judges them and updates the parameters: the parameters, the state, metrics, answers.

    Draws are the same whether a group computes its prompt once (`is_shared`) or not.
    """
    if not is_shared:
        prompts = without_sharing(prompts, group_size)
    rollouts = roll_out(decoder, prompts, key, group_size if is_shared else 1)
    decoder, optimizer_state, metrics = improve(
        decoder, optimizer_state, prompts, rollouts, optimizer=optimizer, group_size=group_size
    )
    return decoder, optimizer_state, metrics, rollouts


def teach(seed: int, num_steps: int) -> Decoder:
    """Makes a decoder and has it read texts that look like the task, their digits in any order."""
    decoder: Any = Decoder(CONFIG, rngs=nnx.Rngs(seed))  # optax's types know of no modules
    optimizer = training.make_optimizer(training.Recipe(steps=num_steps))
    state, cache = optimizer.init(decoder), empty_cache(CONFIG, NUM_TEXTS, MAX_PROMPT + MAX_ANSWER - 1)
    for step in range(num_steps):
        texts = unsorted_texts(np.random.default_rng([seed, 0, step]), NUM_TEXTS)
        decoder, state, _ = training.update(decoder, state, texts, cache, optimizer=optimizer)
    return decoder


@functools.cache  # programs are compiled once for each optimizer
def make_optimizer() -> optax.GradientTransformation:
    """Adam, from small steps to `LEARNING_RATE`; long gradients are shortened."""
    rate = optax.warmup_constant_schedule(0.0, LEARNING_RATE, WARMUP)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))
