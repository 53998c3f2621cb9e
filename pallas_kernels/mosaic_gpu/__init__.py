"""Kernels for NVIDIA GPUs from Ampere on, in Pallas Mosaic GPU."""

from pallas_kernels.mosaic_gpu.append import append_kv, append_scaled
from pallas_kernels.mosaic_gpu.decode import paged_decode, plan_for
from pallas_kernels.mosaic_gpu.decode_plan import DecodePlan
from pallas_kernels.mosaic_gpu.limits import why_not
from pallas_kernels.mosaic_gpu.merge import merge_attention
from pallas_kernels.mosaic_gpu.move_blocks import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.mosaic_gpu.prefill import MIN_QUERIES, paged_prefill, why_not_prefill

__all__ = [
    "MIN_QUERIES",
    "DecodePlan",
    "append_kv",
    "append_scaled",
    "copy_blocks",
    "gather_blocks",
    "merge_attention",
    "paged_decode",
    "paged_prefill",
    "plan_for",
    "scatter_blocks",
    "why_not",
    "why_not_prefill",
]
