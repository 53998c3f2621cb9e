"""The arrays of a block: their shapes, and which of their axes count heads and tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec


class BlockArray(NamedTuple):
    """An array that every block of a layer has.

    Attributes:
      shape: Of one block of one layer.
      dtype: Any dtype of jax.
      head_axis: The axis of key/value heads, over which a mesh may split the array; None for none.
      token_axis: The axis of the block's tokens, over which a mesh may split it too; None for one entry
        of all tokens up to the block's end.
    """

    shape: tuple[int, ...]
    dtype: Any
    head_axis: int | None = 0
    token_axis: int | None = 1

    def spec(self, head_axis: str | None, context_axis: str | None = None) -> PartitionSpec:
        """Splits the heads and the tokens over mesh axes; None for none."""
        axes = {self.token_axis: context_axis, self.head_axis: head_axis}
        return PartitionSpec(*[axes.get(i) for i in range(len(self.shape))])

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of the entries of one token."""
        if self.token_axis is None:
            return self.shape
        axis = self.axis_of_tokens
        return self.shape[:axis] + self.shape[axis + 1 :]

    @property
    def axis_of_tokens(self) -> int:
        """The axis of tokens, of an array that has one."""
        assert self.token_axis is not None
        return self.token_axis

    @property
    def before_tokens(self) -> tuple[slice, ...]:
        """The index of all entries along the axes before the tokens' axis."""
        return (slice(None),) * (self.token_axis or 0)

    @property
    def token_head_axis(self) -> int | None:
        """The axis of heads in the entries of one token."""
        if self.head_axis is None or self.token_axis is None or self.head_axis < self.token_axis:
            return self.head_axis
        return self.head_axis - 1


def check_arrays(label: str, arrays: Mapping[str, BlockArray], block_size: int) -> None:
    """Refuses arrays that a pool cannot hold, by the kind's `label`."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise ValueError(f"{label}.arrays() returned {arrays!r}, expected at least one array, by its name")
    for name, array in arrays.items():
        where = f"{label}.arrays()[{name!r}]"
        if not isinstance(array, BlockArray):
            raise TypeError(f"{where} is {array!r}, expected a kvcache_jax.BlockArray")
        axes = range(len(array.shape))
        axis = array.token_axis
        if axis is not None and (axis not in axes or array.shape[axis] != block_size):
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
