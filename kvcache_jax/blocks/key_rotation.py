"""The rotation of stored keys to another position of the text."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.number_checks import static_count, static_flag

Rotate = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of keys `f32[..., heads, head_dim]` and distances `i32[...]`, which returns rotated keys."""


_BY_FREQUENCY = "default", "linear", "llama3", "yarn"
_BY_POSITION = "dynamic", "longrope"


def key_rotation(
    inv_freq: Any, max_distance: int, *, rope_type: str = "default", is_interleaved: bool = False
) -> Rotate:
    """Makes the function that rotates keys from their position to one `distance` later.

    Cosines and sines come from a table that is made in float64: an angle in float32 is wrong by 1e-7 of
    itself, which at distance 30,000 is 4e-3. A distance of 0 changes no bit; one beyond the table gives NaN.
    Make the function once: another one is another program.

    Args:
      inv_freq: f64[d], radians per position of each pair of features, with all scaling in it. A key's
        features after the first `2 * d` are not rotated.
      max_distance: Most positions that a key moves by, in either direction.
      rope_type: Name of the scaling. Those that change frequencies alone are served: "default", "linear",
        "llama3" and "yarn", whose factor on keys stays on them.
      is_interleaved: Features `2 i` and `2 i + 1` are a pair, in place of `i` and `i + d`.

    Returns:
      The function, for operations with an argument `rotate`.

    Raises:
      NotImplementedError: the angles of a token depend on the length of its text: "dynamic", "longrope".
      ValueError, TypeError: another name, or anything but a list of finite frequencies.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvcache_jax.blocks.key_rotation import key_rotation
      >>> rotate = key_rotation([1.0, 0.1], max_distance=100)
      >>> keys = jnp.ones((3, 1, 4))
      >>> rotate(keys, jnp.array([0, 7, -7])).round(2)[:, 0].tolist()[0]
      [1.0, 1.0, 1.0, 1.0]

    References:
      RoFormer (Su et al.; arXiv:2104.09864), for the rotation.
    """
    if rope_type in _BY_POSITION:
        raise NotImplementedError(
            f"rope_type is {rope_type!r}, expected one of {', '.join(map(repr, _BY_FREQUENCY))}: its angles "
            "depend on the length of the text, so that a key has no rotation to another position"
        )
    if rope_type not in _BY_FREQUENCY:
        raise ValueError(f"rope_type is {rope_type!r}, expected one of {', '.join(map(repr, _BY_FREQUENCY))}")
    max_distance = static_count("max_distance", max_distance, least=0)
    is_interleaved = static_flag("is_interleaved", is_interleaved)
    if isinstance(inv_freq, Tracer):
        raise TypeError("inv_freq is traced, expected numbers of the host: the table is made in float64")
    try:
        frequencies = np.asarray(inv_freq, np.float64)
    except (TypeError, ValueError):
        frequencies = np.zeros(0)
    if frequencies.ndim != 1 or not frequencies.size or not np.isfinite(frequencies).all():
        raise ValueError(f"inv_freq is {inv_freq!r}, expected a list of finite frequencies, one per pair")
    angles = np.arange(max_distance + 1)[:, None] * frequencies
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    num_rotated = 2 * frequencies.size

    def rotate(keys: jax.Array, distance: jax.Array) -> jax.Array:
        if keys.shape[-1] < num_rotated:
            raise ValueError(
                f"keys have {keys.shape[-1]} features and inv_freq {num_rotated // 2} frequencies, expected "
                f"at most {keys.shape[-1] // 2}, one per pair of features"
            )
        cosine = get_at(jnp.asarray(cosines), jnp.abs(distance), jnp.nan)[..., None, :]
        sine = get_at(jnp.asarray(sines), jnp.abs(distance), jnp.nan)[..., None, :]
        sine = jnp.where((distance < 0)[..., None, None], -sine, sine)
        rotated, rest = keys[..., :num_rotated], keys[..., num_rotated:]
        if is_interleaved:
            x, y = rotated[..., 0::2], rotated[..., 1::2]
        else:
            x, y = jnp.split(rotated, 2, axis=-1)
        x, y = x * cosine - y * sine, y * cosine + x * sine
        if is_interleaved:
            rotated = jnp.stack([x, y], axis=-1).reshape(rotated.shape)
        else:
            rotated = jnp.concatenate([x, y], axis=-1)
        return jnp.concatenate([rotated, rest], axis=-1)

    return rotate


def rotations_of_groups(
    rotate: Rotate | Sequence[Rotate | None] | None, config: Any
) -> tuple[Rotate | None, ...]:
    """Checks a rotation of all layers, or one of each, and returns the rotation of each layer group."""
    if rotate is None or callable(rotate):
        return (rotate,) * len(config.groups)
    of_layers = [*rotate] if isinstance(rotate, Sequence) else []
    if len(of_layers) != config.num_layers or not all(f is None or callable(f) for f in of_layers):
        raise TypeError(
            f"rotate is {rotate!r}, expected a function of keys and distances, None, or a list with one of "
            f"them for each of {config.num_layers} layers"
        )
    for group in config.groups:
        if len({id(of_layers[layer]) for layer in group.layer_ids}) > 1:
            raise ValueError(
                f"rotate differs among layers {group.layer_ids}, which are one group, expected one function "
                "for all: give their kinds sizes of their own, such as num_blocks, and they form groups"
            )
    return tuple(of_layers[group.layer_ids[0]] if group.layer_ids else None for group in config.groups)
