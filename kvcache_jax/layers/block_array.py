"""The arrays of a block: their shapes, and which of their axes count heads and tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp


class BlockArray(NamedTuple):
    """An array that every block of a layer has.

    Attributes:
      shape: Of one block of one layer.
      dtype: Any dtype of jax.
      head_axis: The axis of key/value heads, over which a mesh may split the array; None for none.
      token_axis: The axis of the block's tokens; None for one entry of all tokens up to the block's end.
    """

    shape: tuple[int, ...]
    dtype: Any
    head_axis: int | None = 0
    token_axis: int | None = 1

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of the entries of one token."""
        if self.token_axis is None:
            return self.shape
        return self.shape[: self.token_axis] + self.shape[self.token_axis + 1 :]

    @property
    def token_head_axis(self) -> int | None:
        """The axis of heads in the entries of one token."""
        if self.head_axis is None or self.token_axis is None or self.head_axis < self.token_axis:
            return self.head_axis
        return self.head_axis - 1


def check_arrays(label: str, arrays: Mapping[str, BlockArray], block_size: int) -> None:
    """Refuses arrays that a pool cannot hold, by the kind's `label`."""
    if not arrays:
        raise ValueError(f"{label}.arrays() has no array, expected at least one")
    for name, array in arrays.items():
        where = f"{label}.arrays()[{name!r}]"
        if not isinstance(array, BlockArray):
            raise TypeError(f"{where} is {array!r}, expected a kvcache_jax.BlockArray")
        axes = range(len(array.shape))
        has_tokens = array.token_axis is not None
        if has_tokens and (array.token_axis not in axes or array.shape[array.token_axis] != block_size):
            raise ValueError(
                f"{where} has shape {array.shape} and token_axis = {array.token_axis}, expected an axis of "
                f"block_size = {block_size} tokens: a kind whose blocks hold more than an entry per token is "
                "not supported"
            )
        if array.head_axis is not None and (
            array.head_axis not in axes or array.head_axis == array.token_axis
        ):
            raise ValueError(
                f"{where} has shape {array.shape} and head_axis = {array.head_axis}, expected another axis "
                f"than token_axis = {array.token_axis}, or None"
            )
        try:
            jnp.dtype(array.dtype)
        except TypeError as error:
            raise TypeError(f"{where} has dtype {array.dtype!r} ({error}), expected one of jax's") from None
