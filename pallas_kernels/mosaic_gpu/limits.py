"""What the GPU kernels do not take, and the GPU that they are cut for."""

import jax

NUM_SMS = 132
"""Of an H100 or H200 on SXM; on a chip with fewer the kernels are as correct."""
SHARED_MEMORY = 227 * 1024
"""Bytes of an SM that the CTAs on it share."""
HEAD_DIMS = (64, 128, 256)
MAX_BLOCK_SIZE = 512


def check_gpu_pool(pool: jax.Array, dtypes: tuple[str, ...]) -> None:
    """Raises unless the pool has one of the dtypes, and blocks that the copy engine moves."""
    _, _, block_size, head_dim = pool.shape
    instead = "or use the XLA implementation"
    if pool.dtype.name not in dtypes:
        expected = " or ".join(dtypes)
        raise ValueError(f"the pools are {pool.dtype}, expected {expected} on a GPU: change it, {instead}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}, expected one of {HEAD_DIMS} on a GPU: pad it, {instead}")
    if block_size % 8 or not 8 <= block_size <= MAX_BLOCK_SIZE:
        expected = f"a multiple of 8 up to {MAX_BLOCK_SIZE}"
        raise ValueError(f"block_size is {block_size}, expected {expected} on a GPU: change it, {instead}")
