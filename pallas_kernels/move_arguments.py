"""What the arguments of the kernels that move blocks and append tokens must look like."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_rows import check_layer, check_pools


def check_moved_blocks(
    k_pool: jax.Array, v_pool: jax.Array, num_blocks: int, count: jax.Array | None = None, **ids: jax.Array
) -> None:
    """Raises unless the pools fit together, `count`, if any, is i32[] and all `ids`, by name, are i32[n]."""
    check_pools(k_pool, v_pool, num_blocks)
    if count is not None and (jnp.shape(count) != () or jnp.result_type(count) != jnp.int32):
        raise ValueError(f"count is {jnp.result_type(count)}{jnp.shape(count)}, expected an int32 scalar")
    (first, *_) = ids.values()
    for name, values in ids.items():
        if values.ndim != 1 or values.shape != first.shape or values.dtype != jnp.int32:
            expected = "int32[n]" if values is first else f"int32[{first.size}]"
            raise ValueError(f"{name} is {values.dtype}{values.shape}, expected {expected}")
    if isinstance(count, int | np.integer) and not 0 <= count <= first.size:
        raise ValueError(f"count is {count}, expected 0 to {first.size}, the number of ids")


def check_block_values(
    k_pool: jax.Array, k: jax.Array, v: jax.Array, block_ids: jax.Array, num_blocks: int
) -> None:
    """Raises unless `k` and `v` are `[n, num_layers, num_kv_heads, block_size, head_dim]`."""
    expected = (block_ids.shape[0], k_pool.shape[0] // num_blocks, *k_pool.shape[1:])
    for name, values in (("k", k), ("v", v)):
        if values.shape != expected:
            raise ValueError(
                f"{name} has shape {values.shape}, expected [n, num_layers, num_kv_heads, block_size, "
                f"head_dim] = {expected}"
            )
        _check_real(name, values)


def check_append(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    num_blocks: int,
    layer: jax.Array | int,
) -> None:
    """Raises unless `k` and `v` are `[n, num_kv_heads, head_dim]`, and `slots` is i32[n]."""
    check_pools(k_pool, v_pool, num_blocks)
    check_layer(layer, k_pool.shape[0] // num_blocks)
    if slots.ndim != 1 or slots.dtype != jnp.int32:
        raise ValueError(f"slots is {slots.dtype}{slots.shape}, expected int32[n]")
    expected = (slots.shape[0], k_pool.shape[1], k_pool.shape[3])
    for name, values in (("k", k), ("v", v)):
        if values.shape != expected:
            raise ValueError(
                f"{name} has shape {values.shape}, expected [n, num_kv_heads, head_dim] = {expected}"
            )
        _check_real(name, values)


def _check_real(name: str, values: jax.Array) -> None:
    """Raises if a cast to the pools' dtype would drop an imaginary part."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise ValueError(f"{name} is {values.dtype}, expected real numbers")
