"""Sinks that move along: the first tokens of rows, seen as if the text between them and the window were not.

What `drop(positions="cache")` lets go shortens the way from a query to the sinks. No key behind them moves:
the keys of the sinks are rotated by as many positions as were let go. They are rotated from the original ones
each time, which the row keeps in blocks beside those that it reads: `BlockPool.sink_blocks`.
"""

from typing import Any

from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.layer_kinds.span import ceil_div

TEXT, CACHE = "text", "cache"


def num_sink_columns(config: Any, group: LayerGroup) -> int:
    """Counts the blocks of a layer group that hold a row's sinks; 0 where no sinks move."""
    if config.max_sink_len is None or group.holds_sources:
        return 0
    return ceil_div(config.max_sink_len, group.block_size)


def check_max_sink_len(config: Any) -> None:
    """Refuses a `max_sink_len` that the config cannot serve.

    Raises:
      ValueError, NotImplementedError: names got, expected and the fix.
    """
    if config.max_sink_len is None:
        return
    if not config.enable_drop or config.enable_prefix_caching:
        raise ValueError(
            f"max_sink_len is {config.max_sink_len}, expected enable_drop=True with it and no "
            "enable_prefix_caching: sinks move where tokens behind them are dropped"
        )
    if config.max_sink_len > config.max_seq_len:
        raise ValueError(
            f"max_sink_len is {config.max_sink_len}, expected at most max_seq_len = {config.max_seq_len}"
        )
    for group in config.groups:
        if group.kind.rotated_features is None and not group.holds_sources:
            raise NotImplementedError(
                f"max_sink_len is given and layers[{group.layer_ids[0]}] is {group.kind.label}, expected "
                "layers whose keys can be rotated to another position, as FullAttention"
            )
