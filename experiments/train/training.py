"""The training loop of `experiments.train`: a recipe, a decoder, bytes."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from experiments.common import corpus
from experiments.train.bits_per_byte import empty_cache, losses
from models.decoder import Decoder, DecoderConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. Learning rates rise to a peak and fall along a cosine, at whose end is a fiftieth of it.

    Attributes:
      steps: Updates.
      seed: Of the first parameters and of the windows.
      tokens_per_step: Bytes that an update sees.
      short_length: Bytes of a window at first.
      long_length: At the end: what is far away is learnt last, for it is dear.
      long_share: Share of the steps with long windows.
      cosine_share: Share of the cosine that the steps go along.
      matrix_learning_rate: Peak, of Muon.
      learning_rate: Peak, of AdamW.
      weight_decay: Times the learning rate.
      warmup_steps: Until the peak.
      max_gradient_norm: Longer gradients are shortened.
    """

    steps: int = 1800
    seed: int = 0
    tokens_per_step: int = 4096
    short_length: int = 256
    long_length: int = 1024
    long_share: float = 1 / 18
    cosine_share: float = 0.9
    matrix_learning_rate: float = 2e-2
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    warmup_steps: int = 30
    max_gradient_norm: float = 1.0

    def length(self, step: int) -> int:
        is_short = step < round(self.steps * (1 - self.long_share))
        return self.short_length if is_short else self.long_length


def train(
    recipe: Recipe,
    config: DecoderConfig,
    data: np.ndarray,
    on_step: Callable[[int, np.ndarray], None] = lambda num_done, bits: None,
) -> tuple[Decoder, np.ndarray]:
    """Trains a decoder on bytes u8[n]; `on_step` hears of the steps done and their losses in bits per byte.

    Returns the model, and the mean loss of each step in bits per byte, f64[steps].
    """
    if len(data) <= recipe.long_length:
        raise ValueError(f"there are {len(data)} bytes to train on, expected over {recipe.long_length}")
    optimizer = make_optimizer(recipe)
    decoder: Any = Decoder(config, rngs=nnx.Rngs(recipe.seed))  # optax's types know of no modules
    optimizer_state, bits, caches = optimizer.init(decoder), np.zeros(recipe.steps), {}
    for step in range(recipe.steps):
        length = recipe.length(step)
        num_rows = max(1, recipe.tokens_per_step // length)
        if length not in caches:
            caches[length] = empty_cache(config, num_rows, length)
        windows = corpus.windows(data, recipe.seed, step, num_rows, length)
        decoder, optimizer_state, loss = update(
            decoder, optimizer_state, windows, caches[length], optimizer=optimizer
        )
        bits[step] = float(loss) / math.log(2)
        if not math.isfinite(bits[step]):
            raise FloatingPointError(f"the loss is {bits[step]} at step {step}: lower the learning rates")
        on_step(step + 1, bits[: step + 1])
    return decoder, bits


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("decoder", "optimizer_state"))
def update(decoder, optimizer_state, windows, cache, *, optimizer):
    """One step: the new parameters, the new state, the mean loss in nats."""
    loss, gradient = jax.value_and_grad(lambda decoder: losses(decoder, windows, cache).mean())(decoder)
    changes, optimizer_state = optimizer.update(gradient, optimizer_state, decoder)
    return optax.apply_updates(decoder, changes), optimizer_state, loss


@functools.cache  # `update` is compiled once for each optimizer
def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for the embedding and the norms."""

    def schedule(peak: float) -> optax.Schedule:
        warmup_steps = min(recipe.warmup_steps, recipe.steps // 2)
        decay_steps = round(recipe.steps / recipe.cosine_share)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, decay_steps, 0.02 * peak)

    def dimensions(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        if "kernel" not in jax.tree_util.keystr(path):
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)  # [layers, in, out]

    return optax.chain(
        optax.clip_by_global_norm(recipe.max_gradient_norm),
        optax.contrib.muon(
            schedule(recipe.matrix_learning_rate),
            weight_decay=recipe.weight_decay,
            adam_learning_rate=schedule(recipe.learning_rate),
            adam_weight_decay=recipe.weight_decay,
            muon_weight_dimension_numbers=functools.partial(jax.tree_util.tree_map_with_path, dimensions),
        ),
    )


def settings_of(recipe: Recipe, config: DecoderConfig, data: np.ndarray) -> dict[str, Any]:
    """What makes two runs the same."""
    return dataclasses.asdict(recipe) | dataclasses.asdict(config) | {"corpus": corpus.digest(data)}
