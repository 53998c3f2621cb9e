"""Checks of `CacheConfig.context_axis`, the mesh axis that splits the tokens of blocks."""

from collections.abc import Sequence
from typing import Any

from kvcache_jax.core.extras import Keeper
from kvcache_jax.layers.layer_group import LayerGroup


def check_context_axis(
    axis: Any, head_axis: str | None, groups: Sequence[LayerGroup], keeper: Keeper
) -> None:
    """Refuses what names no mesh axis, and what cannot do with a part of a block: states, and keepers."""
    if axis is None:
        return
    if not isinstance(axis, str):
        raise TypeError(f"context_axis is {axis!r}, expected the name of a mesh axis, or None")
    if axis == head_axis:
        raise ValueError(
            f"context_axis and head_axis are both {axis!r}, expected two axes of a mesh: leave one of "
            "the options out"
        )
    if keeper.memory_kind is not None:
        raise NotImplementedError(
            f"context_axis is {axis!r} and extras has a {type(keeper).__name__}, expected one of the two: it "
            "keeps whole blocks"
        )
    for group in groups:
        has_entries_of_blocks = any(array.token_axis is None for _, array in group.arrays)
        if group.span.is_read_later or has_entries_of_blocks:
            raise NotImplementedError(
                f"context_axis is {axis!r} and layers[{group.layer_ids[0]}] is {group.kind.label}, expected "
                "layers of keys and values: a state stands for all tokens of a block, and cannot be split by "
                "tokens; leave context_axis out, head_axis splits heads"
            )


def check_tokens_divide(groups: Sequence[LayerGroup], axis: str, num_devices: int) -> None:
    """Refuses blocks whose tokens the devices of a mesh axis do not divide."""
    for group in groups:
        if group.layer_ids and group.block_size % num_devices:
            raise ValueError(
                f"{group.kind.label} layers have blocks of {group.block_size} tokens, and the mesh axis "
                f"{axis!r} splits them over {num_devices} devices, expected a multiple of {num_devices}: "
                f"change block_size, or take an axis whose size divides {group.block_size}"
            )
