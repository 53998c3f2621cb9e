"""The kernels for TPUs, in Mosaic TPU: what `pallas_kernels.reference` has but merging, with `interpret`.

With `interpret=True` they run on any machine, slowly, and look for races; otherwise they need a TPU.
"""

from pallas_kernels.mosaic_tpu.append import append_kv
from pallas_kernels.mosaic_tpu.decode import paged_decode
from pallas_kernels.mosaic_tpu.limits import why_not
from pallas_kernels.mosaic_tpu.movement import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.mosaic_tpu.prefill import paged_prefill, queries_per_row

__all__ = [
    "append_kv",
    "copy_blocks",
    "gather_blocks",
    "paged_decode",
    "paged_prefill",
    "queries_per_row",
    "scatter_blocks",
    "why_not",
]
