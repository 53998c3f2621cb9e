"""What the GPU kernels do not take, and the GPU that they are cut for."""

from typing import Any

import jax

from pallas_kernels.eight_bits import NUMBERS
from pallas_kernels.gpus import HOPPER, Gpu, gpu_of
from pallas_kernels.mosaic_gpu.decode_plan import MAX_GROUP_SIZE

NUM_SMS = 132
"""Of an H100 or H200 on SXM."""
REGISTERS = 64 * 1024
"""Of an SM, of 32 bits; a thread gets them by eights."""
HEAD_DIMS = (64, 128, 256)
WIDENED_HEAD_DIMS = (64, 128)
"""Of pools of 8 bits: wider heads spill registers."""
MAX_BLOCK_SIZE = 512
DECODED = ("bfloat16", "float16")
MOVED = (*DECODED, "float32")


def target() -> Gpu:
    """Finds the GPU that is traced for: the mesh's, or jax's first; a Hopper if neither is one of `GPUS`."""
    device = _traced_for()
    if device is None:
        return HOPPER
    return gpu_of(device.device_kind, getattr(device, "compute_capability", None)) or HOPPER


def num_sms() -> int:
    """Counts the SMs of the GPU that is traced for; of an H200 if there is none.

    On a chip with more or fewer the kernels are as correct.
    """
    device = _traced_for()
    if device is None:
        return NUM_SMS
    return getattr(device, "core_count", None) or device.num_cores or NUM_SMS


def _traced_for() -> Any:
    """The device of the mesh, of which a mesh itself knows but the name and the SMs, or jax's first GPU."""
    on_mesh, local = jax.sharding.get_abstract_mesh().abstract_device, jax.local_devices()
    if on_mesh is None or on_mesh.platform not in ("gpu", "cuda"):
        return local[0] if local[0].platform == "gpu" else None
    return next((device for device in local if device.device_kind == on_mesh.device_kind), on_mesh)


def why_not(k_pool: jax.Array, group_size: int) -> str | None:
    """Why the decode does not take a pool, with so many query heads per key/value head; None if it does."""
    if reason := why_not_pool(k_pool, (*DECODED, *NUMBERS)):
        return reason
    if k_pool.dtype.itemsize == 1 and not target().has_copy_engine:
        return (
            f"the pools are {k_pool.dtype}, expected {' or '.join(DECODED)} on a GPU like {target().example}"
        )
    if k_pool.dtype.itemsize == 1 and k_pool.shape[3] not in WIDENED_HEAD_DIMS:
        most = " or ".join(map(str, WIDENED_HEAD_DIMS))
        return f"head_dim is {k_pool.shape[3]} with numbers of 8 bits, expected {most}"
    if group_size > MAX_GROUP_SIZE:
        return f"{group_size} query heads share a key/value head, expected up to {MAX_GROUP_SIZE}"
    return None


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
