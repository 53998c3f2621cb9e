"""The memory plan of a config, which can be read before anything is made."""

import collections
import functools
import math

import jax
import jax.numpy as jnp

from kvcache_jax.core.config import CacheConfig, format_bytes, memory_bytes, require_config
from kvcache_jax.core.empty_state import empty_control
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import LayerKind


@functools.lru_cache(maxsize=64)
def control_bytes(config: CacheConfig) -> int:
    """Counts the bytes of the control state, with the prefix index where there is one."""
    hash_key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    control = jax.eval_shape(lambda hash_key: empty_control(config, hash_key), hash_key)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(control))


def describe(config: CacheConfig) -> str:
    """Describes the memory plan in words, one line per layer group and a total.

    Example:
      >>> import kvcache_jax as kv
      >>> print(kv.describe(kv.CacheConfig([kv.FullAttention(2, 64)] * 4, num_blocks=256)))
      FullAttention x 4 layers: 256 blocks of 16 tokens, 2 heads x 64, float32, 64.0 KiB a block, 16.0 MiB
      16 rows of at most 8192 tokens; keys and values 16.0 MiB, control state 34.6 KiB
    """
    require_config("describe", config)
    lines = []
    for group in config.groups:
        lines.append(
            f"{group.kind.label} x {group.num_layers} layers: "
            f"{group.num_blocks} blocks of {group.block_size} tokens, {_arrays(group)}, "
            f"{format_bytes(group.block_bytes)} a block, {format_bytes(group.pool_bytes)}"
        )
    for layer, num_layers in collections.Counter(_shared_layers(config)).items():
        lines.append(f"{num_layers} layers that read what layer {layer} stores")
    lines.append(
        f"{config.max_seqs} rows of at most {config.max_seq_len} tokens; "
        f"keys and values {format_bytes(memory_bytes(config))}, "
        f"control state {format_bytes(control_bytes(config))}"
    )
    if config.context_axis is not None:
        line = f"the tokens of each block are split over the mesh axis {config.context_axis!r}"
        if num_devices := jax.sharding.get_abstract_mesh().shape.get(config.context_axis):
            of_each = format_bytes(memory_bytes(config) // num_devices)
            line += f": {of_each} of keys and values on each of {num_devices} devices"
        lines.append(line)
    if config.enable_prefix_caching and config.snapshot_groups:
        lines.append(
            f"states are kept with prefixes, of which {config.prefix_unit} tokens are the least that hits"
        )
    return "\n".join(lines)


def _shared_layers(config: CacheConfig) -> list[int]:
    """Lists the layers that others read, each as often as one does."""
    return [kind.shared_layer for kind in config.layers if kind.shared_layer is not None]


def _arrays(group: LayerGroup) -> str:
    """Names a token's numbers in each array of a block."""
    kind = group.kind
    if type(kind).arrays is LayerKind.arrays:
        return f"{kind.num_kv_heads} heads x {kind.head_dim}, {kind.dtype.name}"
    return ", ".join(
        f"{name} {jnp.dtype(array.dtype).name}{list(array.token_shape)}" for name, array in group.arrays
    )
