"""The platform that a program is traced for."""

import jax


def target_platform() -> str:
    """Returns "cpu", "cuda" or "tpu": of the mesh's devices where one is set, else of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = None if device is None else device.platform
    platform = platform or jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def by_platform(*, cpu: int, accelerator: int) -> int:
    """Returns the batch size for the target: CPUs want what fits their caches, accelerators few launches."""
    return cpu if target_platform() == "cpu" else accelerator
