"""Checks of the mesh axes of a config: `context_axis`, which splits the tokens of blocks, and `head_axis`."""

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


def check_heads_divide(groups: Sequence[LayerGroup], axis: Any, num_devices: int) -> None:
    """Refuses heads that the devices of a mesh axis, or of several, do not divide."""
    for group in groups:
        for name, array in group.arrays:
            num_heads = num_devices if array.head_axis is None else array.shape[array.head_axis]
            if num_heads % num_devices:
                raise ValueError(
                    f"the array {name!r} of {group.kind.label} layers has {num_heads} heads, and the mesh "
                    f"axis {axis!r} splits them over {num_devices} devices, expected a multiple of "
                    f"{num_devices}: change the kind's heads, or take an axis whose size divides {num_heads}"
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
