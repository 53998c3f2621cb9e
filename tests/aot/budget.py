"""What a program that is compiled for a GPU may cost; the cases are in `kernel_cases`."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tests.aot.target import H200, Target


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of a compiled program; of several kernels, the largest, or where said their sum.

    Attributes:
      registers: Of one thread, at most.
      shared_memory: Bytes of one CTA, at most.
      spill_bytes: Registers stored in and loaded from local memory, at most; summed.
      min_wgmma: Tensor core instructions that read shared memory (HGMMA), at least; summed.
      min_mma: Tensor core instructions that read registers (HMMA), at least; summed.
      min_tma: Loads by the copy engine (UTMALDG), at least; summed.
      min_thread_copies: Copies of threads to shared memory (LDGSTS), at least; summed.
      min_fences: Between stores of threads and reads by other hardware (fence.proxy.async), at least; summed.
      temporary_bytes: Device memory beside arguments and results, at most.
    """

    registers: int
    shared_memory: int
    spill_bytes: int = 0
    min_wgmma: int = 0
    min_mma: int = 0
    min_tma: int = 0
    min_thread_copies: int = 0
    min_fences: int = 0
    temporary_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """A program to compile.

    Attributes:
      name: Unique.
      function: Takes what `arguments` returns.
      arguments: Builds the arguments, pytrees of `jax.ShapeDtypeStruct`.
      budget: See `Budget`.
      kernels: Names of the kernels that the program must call.
      pools: Positions of arguments that must never be copied; arrays.
      in_place: Those of `pools` that are donated, and must be updated where they are.
      num_devices: GPUs, on the mesh axis `h200.HEADS`.
      split: Arrays that are split over the devices: from the position of the argument to the axis.
      compiler_options: For XLA, beyond its defaults.
      target: The GPU.
    """

    name: str
    function: Callable
    arguments: Callable[[], tuple]
    budget: Budget
    kernels: tuple[str, ...]
    pools: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    num_devices: int = 1
    split: Mapping[int, int] = MappingProxyType({})
    compiler_options: Mapping[str, Any] = MappingProxyType({})
    target: Target = H200


def pool(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str = "bfloat16"):
    """The shape of a pool, of all layers."""
    return jax.ShapeDtypeStruct((num_blocks, num_kv_heads, block_size, head_dim), jnp.dtype(dtype))


def i32(*shape: int) -> Any:
    """The shape of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
