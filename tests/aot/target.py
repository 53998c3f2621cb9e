"""GPUs to compile for, on a machine without one: what XLA and Mosaic ask of a device."""

import dataclasses

from pallas_kernels import gpus
from pallas_kernels.gpus import HOPPER, RTX_50, Gpu

# XLA's GpuTargetConfigProto in text form, with the facts of the chip.
_TARGET = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  model_str: "sm_{capability}{features} with {memory}B RAM, {num_sms} cores"
  platform_version: "Compute Capability {capability}{features}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: {num_sms}
  fpus_per_core: 128
  clock_rate_ghz: {clock_ghz}
  device_address_bits: 64
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  l2_cache_size: {l2_cache}
  shared_memory_per_core: {shared_memory_per_sm}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads_per_sm}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, by its data sheet.

    Attributes:
      gpu: What the kernels know of it.
      num_sms: SMs.
      clock_ghz: Of them.
      threads_per_sm: At most.
      memory: Bytes.
      bandwidth: Of the memory, bytes per second.
      l2_cache: Bytes.
    """

    gpu: Gpu
    num_sms: int
    clock_ghz: float
    threads_per_sm: int
    memory: int
    bandwidth: int
    l2_cache: int

    @property
    def name(self) -> str:
        """As jax names such a device."""
        return f"NVIDIA {self.gpu.example}"

    def text(self) -> str:
        """Returns what XLA reads."""
        major, minor = self.gpu.capability.split(".")
        is_accelerated = int(major) >= 9
        return _TARGET.format(
            name=self.name,
            capability=self.gpu.capability,
            major=major,
            minor=minor,
            features="a" * is_accelerated,
            extension="ACCELERATED_FEATURES" if is_accelerated else "NONE",
            shared_memory=self.gpu.shared_memory,
            shared_memory_per_sm=self.gpu.shared_memory + 1024,
            **{field: getattr(self, field) for field in list(self.__dataclass_fields__)[1:]},
        )


H200 = Target(HOPPER, 132, 1.98, 2048, 151_397_597_184, 4_800_000_000_000, 52_428_800)
B200 = Target(gpus.B200, 148, 1.965, 2048, 191_500_000_000, 8_000_000_000_000, 132_644_864)
RTX_5090 = Target(RTX_50, 170, 2.407, 1536, 34_190_000_000, 1_792_000_000_000, 100_663_296)
A100 = Target(gpus.A100, 108, 1.41, 2048, 85_899_345_920, 2_039_000_000_000, 41_943_040)
L4 = Target(gpus.L4, 58, 2.04, 1536, 24_152_000_000, 300_000_000_000, 50_331_648)
