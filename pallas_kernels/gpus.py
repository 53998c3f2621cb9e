"""The NVIDIA GPUs that the kernels are for."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Gpu:
    """GPUs of one compute capability.

    Attributes:
      example: The name of one.
      capability: Such as "9.0".
      kinds: A pattern of their names, by which they go where nothing else is known of a device.
      shared_memory: Bytes of an SM that the CTAs on it share; of one alone, the most.
      has_wgmma: Whether tensor cores read their factors from shared memory; else threads load them (mma).
      has_copy_engine: Whether copies run by themselves (TMA) and say to barriers when they are done; else
        threads copy (cp.async), each a part, and wait for their own.
    """

    example: str
    capability: str
    kinds: str
    shared_memory: int
    has_wgmma: bool = False
    has_copy_engine: bool = True


HOPPER = Gpu("H200", "9.0", r"\bG?H(20|100|200|800)\b", 227 * 1024, has_wgmma=True)
B200 = Gpu("B200", "10.0", r"\bG?B[12]00\b", 227 * 1024)
RTX_50 = Gpu("RTX 5090", "12.0", r"\bRTX (50\d\d|PRO \d+ Blackwell)\b", 99 * 1024)
A100 = Gpu("A100", "8.0", r"\bA(30X?|100[XD]?|800)\b", 163 * 1024, has_copy_engine=False)
A10 = Gpu(
    "A10", "8.6", r"\b(A10G?|A16|A2|A40|(?<!Quadro )RTX (A\d+|30\d\d))\b", 99 * 1024, has_copy_engine=False
)
L4 = Gpu(
    "L4", "8.9", r"\b(L4|L20|L40S?|(?<!Quadro )RTX (40\d\d|\d+ Ada))\b", 99 * 1024, has_copy_engine=False
)
GPUS = (A100, A10, L4, HOPPER, B200, RTX_50)

BY_COPY_ENGINE = "paged_prefill", "append_kv", "append_scaled"
"""Kernels for GPUs that have one; also all for pools of 8 bits."""


def served() -> str:
    """Lists compute capabilities, each with an example."""
    return ", ".join(f"{gpu.capability} ({gpu.example})" for gpu in GPUS)


def gpu_of(kind: str, capability: str | None) -> Gpu | None:
    """Finds the entry of a device, by its compute capability or, where that is not known, by its name.

    Args:
      kind: Its name, such as "NVIDIA H200".
      capability: Such as "9.0", or None.

    Returns:
      One of `GPUS`; None if the kernels are not for the device.
    """
    if capability is not None:
        return next((gpu for gpu in GPUS if gpu.capability == capability), None)
    return next((gpu for gpu in GPUS if re.search(gpu.kinds, kind)), None)


def left_out(kind: str, capability: str | None) -> tuple[str, ...]:
    """Lists the kernels that are not for a device, which `gpu_of` is asked for."""
    gpu = gpu_of(kind, capability)
    return () if gpu is None or gpu.has_copy_engine else BY_COPY_ENGINE
