"""An H200 to compile for, on a machine without one."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

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


def sharding() -> SingleDeviceSharding:
    """Of arguments that lie on the H200."""
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=TARGET)
    return SingleDeviceSharding(topology.devices[0])


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """What lowers within it, lowers for the H200: a kernel asks the mesh which chip that is."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=NUM_SMS, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        yield


def place(arguments: object) -> object:
    """`arguments` with every array or shape as a shape on the H200."""
    on_device = sharding()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), arguments)
