"""An H200 to compile for, on a machine without one."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax._src.interpreters.pxla as pxla
from jax.experimental import topologies
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

NUM_SMS = 132
# XLA's GpuTargetConfigProto in text form, with the facts of the chip.
TARGET = f"""
gpu_device_info {{
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  model_str: "sm_9.0a with 151397597184B RAM, {NUM_SMS} cores"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: {NUM_SMS}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_address_bits: 64
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "NVIDIA H200"
"""


HEADS = "heads"
"""The mesh axis of several H200s."""


def mesh(num_devices: int = 1) -> Mesh:
    """H200s of one machine."""
    shape = f"1x{num_devices}x1"
    topology = topologies.get_topology_desc("", platform="cuda", topology=shape, target_config=TARGET)
    return Mesh(topology.devices, (HEADS,))


@contextlib.contextmanager
def lowering(num_devices: int = 1) -> Iterator[None]:
    """What lowers within it, lowers for H200s: a kernel asks the mesh which chip that is."""
    abstract = mesh(num_devices).abstract_mesh
    if num_devices == 1:  # most programs know of no mesh
        abstract = AbstractMesh((), (), abstract_device=abstract.abstract_device)
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
    arguments: Sequence[Any], num_devices: int = 1, split: Mapping[int, int] = MappingProxyType({})
) -> Any:
    """`arguments` with every array or shape as a shape on the H200s.

    Args:
      arguments: Pytrees.
      num_devices: H200s.
      split: Arrays that are split over them: from the position in `arguments` to the axis.
    """
    devices = mesh(num_devices)

    def sharding(position: int) -> Sharding:
        if num_devices == 1:
            return SingleDeviceSharding(devices.devices.item())
        axes = [None] * split[position] + [HEADS] if position in split else []
        return NamedSharding(devices, PartitionSpec(*axes))

    def placed(position: int, argument: Any) -> Any:
        where = sharding(position)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), argument)

    return tuple(placed(*each) for each in enumerate(arguments))
