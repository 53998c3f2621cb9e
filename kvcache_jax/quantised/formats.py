"""Formats in which `Quantised` layers store numbers: a file per format, and a line in `FORMATS`."""

from kvcache_jax.quantised.format import Format
from kvcache_jax.quantised.fp8 import FP8
from kvcache_jax.quantised.int4 import INT4
from kvcache_jax.quantised.int8 import INT8

FORMATS: dict[str, Format] = {
    "int8": INT8,
    "fp8": FP8,
    "int4": INT4,
}
"""Formats by the names that `Quantised(format=)` takes."""
