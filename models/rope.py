"""Rotary embeddings: the angles by which tokens turn queries and keys, and the turning."""

import dataclasses
import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.checks import check_positive, check_positive_or_none, require_positive


class Scaling(Protocol):
    """What stretches a model's rotations over a longer context than it was first trained for.

    Attributes:
      amplitude: Multiplies cosines and sines.
    """

    @property
    def amplitude(self) -> float: ...

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Computes the frequencies f64[dim / 2] in place of plain ones of base `theta`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotations are slowed by `factor` (position interpolation).

    References:
      Extending Context Window of Large Language Models via Positional Interpolation (Chen et al.;
      arXiv:2306.15595).
    """

    factor: float
    amplitude = 1.0

    def __post_init__(self):
        check_positive(self, "factor")

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Divides by the factor."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slows the rotations whose wave is longer than the original context (Llama 3.1's `rope_scaling`).

    Waves shorter than `original_max_seq_len / high_freq_factor` stay, those longer than
    `original_max_seq_len / low_freq_factor` are slowed by `factor`, and between the two it is blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int
    amplitude = 1.0

    def __post_init__(self):
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not high > low:
            raise ValueError(f"high_freq_factor is {high}, expected above low_freq_factor = {low}")

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Divides long waves by the factor."""
        num_waves = self.original_max_seq_len * frequencies / (2 * np.pi)  # within the original context
        low, high = self.low_freq_factor, self.high_freq_factor
        share_kept = np.clip((num_waves - low) / (high - low), 0, 1)
        return frequencies * (share_kept + (1 - share_kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Slows the rotations that turn seldom within the original context, and turns with more than length 1.

    Pairs that turn more than `beta_fast` times within `original_max_seq_len` stay, those that turn less than
    `beta_slow` times are slowed by `factor`, and from pair to pair between the two it is blended.

    Attributes:
      factor: Longer context by original context.
      original_max_seq_len: The original context.
      beta_fast: Turns.
      beta_slow: Turns.
      mscale: How much of the growth of logits the rotations bring; with `mscale_all_dim` alone.
      mscale_all_dim: How much of it the logits of whole heads bring, see `length`; the rotations bring less.
      attention_factor: The amplitude itself, in place of what follows from the others.
      truncate: Whether the first and last blended pair are rounded to whole pairs.

    References:
      YaRN: Efficient Context Window Extension of Large Language Models (Peng et al.; arXiv:2309.00071).
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check_positive(self, "factor", "original_max_seq_len", "beta_fast", "beta_slow")
        check_positive_or_none(self, "mscale", "mscale_all_dim", "attention_factor")
        if not self.beta_fast > self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast}, expected above beta_slow = {self.beta_slow}")

    def length(self, mscale: float) -> float:
        """Returns how much longer a query or a key is for the stretched context."""
        return 1 + 0.1 * mscale * math.log(max(self.factor, 1))

    @property
    def amplitude(self) -> float:
        """The length of a rotation, 1 without scaling."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self.length(self.mscale) / self.length(self.mscale_all_dim)
        return self.length(1)

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Divides the frequencies of slow pairs by the factor."""
        dim = 2 * len(frequencies)

        def pair_that_turns(num_turns: float) -> float:
            return (
                dim * math.log(self.original_max_seq_len / (num_turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 * (first == last)
        share_slowed = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
        return frequencies * (1 - share_slowed + share_slowed / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotations of a layer.

    Attributes:
      theta: Base of the wavelengths.
      scaling: `LinearScaling`, `Llama3Scaling` or `YarnScaling`; None for plain rotations.
      is_interleaved: Whether the pairs (2i, 2i + 1) are turned; else (i, i + dim / 2).
      share: How much of a head is rotated, from its beginning.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None
    is_interleaved: bool = False
    share: float = 1.0

    def __post_init__(self):
        require_positive("rope_theta", self.theta)
        if not 0 < self.share <= 1:
            raise ValueError(f"partial_rotary_factor is {self.share}, expected above 0 and at most 1")
        if self.scaling is not None and not self.theta > 1:
            raise ValueError(f"rope_theta is {self.theta}, expected above 1 where rotations are scaled")

    def frequencies(self, dim: int) -> np.ndarray:
        """Computes the radians per token of each pair, f32[dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, dim, 2) / dim)
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies, self.theta)
        return frequencies.astype(np.float32)

    @property
    def amplitude(self) -> float:
        """The length of cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.amplitude


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["is_interleaved"]
)
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The angles of a step's tokens, the same for all heads.

    Attributes:
      cos: f32[..., 1, dim / 2], their cosines times the amplitude.
      sin: f32[..., 1, dim / 2], likewise.
      is_interleaved: As in `Rope`; static.
    """

    cos: jax.Array
    sin: jax.Array
    is_interleaved: bool


def rotation(rope: Rope | None, dim: int, positions: jax.Array) -> Rotation | None:
    """Computes the angles; positions come from the step, so padding and pieces do not matter."""
    if rope is None:
        return None
    angles = positions[..., None, None].astype(jnp.float32)
    frequencies = jnp.asarray(rope.frequencies(dim))
    angles = angles * jax.lax.broadcast_to_rank(frequencies, angles.ndim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.amplitude != 1:
        cos, sin = rope.amplitude * cos, rope.amplitude * sin
    return Rotation(cos, sin, rope.is_interleaved)


def rotate(x: jax.Array, rotation: Rotation | None) -> jax.Array:
    """Turns the pairs of every head `[..., heads, dim]`; what a head has beyond the rotation stays."""
    if rotation is None:
        return x
    dim = 2 * rotation.cos.shape[-1]
    cos, sin, wide = rotation.cos, rotation.sin, x[..., :dim].astype(jnp.float32)
    if rotation.is_interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(
            wide.shape
        )
    else:
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, x[..., dim:]], axis=-1)
