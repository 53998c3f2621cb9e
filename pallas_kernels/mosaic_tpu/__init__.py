"""The kernels for TPUs, in Mosaic TPU: the interface of `pallas_kernels.reference`, and `interpret`.

With `interpret=True` they run on any machine, slowly, and look for races; otherwise they need a TPU.
"""

from pallas_kernels.mosaic_tpu.decode import paged_decode

__all__ = ["paged_decode"]
