"""The memory plan of a cache: how many blocks each layer group has, and how many can be addressed."""

import dataclasses

from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import MAX_INDEX
from kvcache_jax.layers.span import ceil_div


def spend(budget: int, groups: list[LayerGroup]) -> list[LayerGroup]:
    """Shares `budget` bytes so that all pools fill up at the same number of rows."""
    # States of recurrent layers have as many blocks as all rows need; blocks of tokens alone take no memory.
    fixed = [
        group
        for group in groups
        if group.kind.num_blocks is not None or group.span.is_read_later or not group.arrays
    ]
    shared = [group for group in groups if group not in fixed]
    fixed_bytes = sum(group.pool_bytes for group in fixed)
    if fixed_bytes > budget and not shared:
        raise ValueError(
            f"memory_budget is {budget} bytes, expected at least {fixed_bytes}: the states of all "
            "max_seqs rows take so many; raise the budget or lower max_seqs"
        )
    left = budget - fixed_bytes
    row_bytes = sum(group.max_held_blocks * group.block_bytes for group in shared)
    planned = {}
    for group in shared:
        num_blocks = left * group.max_held_blocks // row_bytes
        if num_blocks < 1:
            smallest = ceil_div(row_bytes, group.max_held_blocks) + budget - left
            raise ValueError(
                f"memory_budget is {budget} bytes, expected at least {max(smallest, group.block_bytes)}: "
                f"a block of {group.num_layers} x {group.kind.label} takes {group.block_bytes}; "
                "raise the budget or lower block_size"
            )
        planned[group.kind] = dataclasses.replace(group, num_blocks=num_blocks)
    return [planned.get(group.kind, group) for group in groups]


def check_indices(group: LayerGroup) -> None:
    """Refuses more blocks than 32-bit indices reach."""
    for what, count in (
        ("num_layers * num_blocks", group.num_layers),
        ("num_blocks * block_size", group.block_size),
    ):
        if count * group.num_blocks >= MAX_INDEX:
            raise ValueError(
                f"{what} is {count * group.num_blocks}, expected below 2**31 so that 32-bit indices reach "
                f"every block and slot; lower num_blocks = {group.num_blocks}"
            )
