"""What the GPU kernels do not take, and the GPU that they are cut for."""

import jax

NUM_SMS = 132
"""Of an H100 or H200 on SXM."""
SHARED_MEMORY = 227 * 1024
"""Bytes of an SM that the CTAs on it share."""
REGISTERS = 64 * 1024
"""Of an SM, of 32 bits; a thread gets them by eights."""
HEAD_DIMS = (64, 128, 256)
MAX_BLOCK_SIZE = 512
DECODED = ("bfloat16", "float16")
MOVED = (*DECODED, "float32")


def num_sms() -> int:
    """Counts the SMs of the GPU that is traced for: the mesh's, or jax's first; of an H200 if neither is one.

    On a chip with more or fewer the kernels are as correct.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores and device.platform in ("gpu", "cuda"):
        return device.num_cores
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS


def why_not_pool(pool: jax.Array, dtypes: tuple[str, ...]) -> str | None:
    """Why the kernels do not take blocks like these, or None if they do."""
    block_size, head_dim = pool.shape[2:]
    if pool.dtype.name not in dtypes:
        return f"the pools are {pool.dtype}, expected {' or '.join(dtypes)}"
    return why_not_block(block_size, head_dim)


def why_not_block(block_size: int, head_dim: int) -> str | None:
    """`why_not_pool` for one head of a block."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, expected {' or '.join(map(str, HEAD_DIMS))}"
    if block_size % 8 or not 8 <= block_size <= MAX_BLOCK_SIZE:
        return f"block_size is {block_size}, expected a multiple of 8 up to {MAX_BLOCK_SIZE}"
    return None


def check_moved_pool(pool: jax.Array) -> None:
    """Raises if the kernels that move blocks and append do not take the pool."""
    if reason := why_not_pool(pool, MOVED):
        raise ValueError(f"{reason}: choose another layout, or the XLA implementation")
