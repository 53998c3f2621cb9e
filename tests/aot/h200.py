"""A GPU to compile for, on a machine without one: an H200, unless another target is named."""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax._src.interpreters.pxla as pxla
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from tests.aot.target import H200, Target

_IN_HASTE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_gpu_disable_gpuasm_optimizations=true",
)
NUM_SMS = H200.num_sms
HEADS = "heads"
"""The mesh axis of several GPUs."""


@dataclasses.dataclass(frozen=True)
class Device(AbstractDevice):
    """One that knows its compute capability, by which Mosaic chooses instructions, as a real one does."""

    compute_capability: str


def start_compiler(*flags: str, in_haste: bool = True) -> None:
    """Prepares this process, in which jax has started no backend, to compile for GPUs without one.

    Args:
      flags: Of XLA.
      in_haste: Whether XLA may generate slow code, in less time. Fusions, buffers, copies and launches are
        decided before; kernels of Mosaic are compiled apart, and are the same.
    """
    jax.config.update("jax_platforms", "cpu")
    # Read when the CUDA plugin starts. There is no GPU to tune on.
    chosen = "--xla_gpu_autotune_level=0", *(_IN_HASTE if in_haste else ()), *flags
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *chosen)).strip()
    gc.set_threshold(100_000, 50, 100)  # as in tests


def abstract_device(target: Target) -> Device:
    """Describes a target as a mesh does."""
    return Device(target.name, target.num_sms, "gpu", target.gpu.capability)


def mesh(num_devices: int = 1, target: Target = H200) -> Mesh:
    """GPUs of one machine."""
    shape, text = f"1x{num_devices}x1", target.text()
    topology = topologies.get_topology_desc("", platform="cuda", topology=shape, target_config=text)
    return Mesh(topology.devices, (HEADS,))


@contextlib.contextmanager
def lowering(num_devices: int = 1, target: Target = H200) -> Iterator[None]:
    """What lowers within it, lowers for such GPUs: a kernel asks the mesh which chip that is."""
    if num_devices == 1:  # most programs know of no mesh
        abstract = AbstractMesh((), (), abstract_device=abstract_device(target))
    else:
        abstract = mesh(num_devices, target).abstract_mesh
    with use_abstract_mesh(abstract):
        yield


HOST = "host"
"""The mesh axis that tells arrays in host memory from others."""


def know_host_memory() -> None:
    """Gives NamedShardings over the axis `HOST` their kind of memory, for this process.

    The devices of a CUDA topology name no memories, so that shardings lose theirs without a word: a program
    would be compiled with all of its arrays on the device.
    """
    before = NamedSharding.memory_kind.fget

    def memory_kind(sharding: NamedSharding) -> str | None:
        is_host = isinstance(sharding.mesh, Mesh) and sharding.mesh.axis_names == (HOST,)
        return "pinned_host" if is_host else before(sharding)

    NamedSharding.memory_kind = property(memory_kind)  # pyright: ignore
    for name in ("_maybe_get_and_check_in_shardings", "_maybe_get_and_check_out_shardings"):
        setattr(pxla, name, lambda executable, shardings, *rest: shardings)


def host_memory(device: jax.Device) -> NamedSharding:
    """Returns the host memory of an H200, for programs compiled after `know_host_memory`."""
    return NamedSharding(Mesh([device], (HOST,)), PartitionSpec(HOST), memory_kind="pinned_host")


def place(
    arguments: Sequence[Any],
    num_devices: int = 1,
    split: Mapping[int, int] = MappingProxyType({}),
    target: Target = H200,
) -> Any:
    """`arguments` with every array or shape as a shape on the GPUs.

    Args:
      arguments: Pytrees.
      num_devices: GPUs.
      split: Arrays that are split over them: from the position in `arguments` to the axis.
      target: Which.
    """
    devices = mesh(num_devices, target)

    def sharding(position: int) -> Sharding:
        if num_devices == 1:
            return SingleDeviceSharding(devices.devices.item())
        axes = [None] * split[position] + [HEADS] if position in split else []
        return NamedSharding(devices, PartitionSpec(*axes))

    def placed(position: int, argument: Any) -> Any:
        where = sharding(position)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), argument)

    return tuple(placed(*each) for each in enumerate(arguments))
