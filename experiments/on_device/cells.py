"""What `experiments.first_gpu_run` decodes beside peers: the cells, and their order. Only Python."""

import random
from typing import NamedTuple

# By importance: the shapes first that fill a GPU.
SHAPES = (
    *((32, 8192), (128, 8192), (8, 32768), (32, 32768), (128, 1024), (1, 32768)),
    *((8, 8192), (32, 1024), (128, 32768), (1, 8192), (8, 1024), (1, 1024)),
)
"""(batch, context)."""
GROUP_SIZES, BLOCK_SIZES = (4, 8, 1), (16, 64, 128)
ROTATED_BYTES = 10**9
"""K and V of all buffers that launches take turns in, at least; an H200 has 60 MB of L2."""
LARGE_BYTES = 3 * 10**8
"""A launch that reads so much is to reach the read bandwidth; below, fixed costs count."""
NAMES_OF_8_BITS = ", int8", ", fp8"
"""Ends of the names of cells."""
NUM_UNOWNED = 2
"""Blocks of a buffer that belong to no row."""


class Cell(NamedTuple):
    """One decode: `batch` rows, each with one query, over `context` tokens in whole blocks.

    Attributes:
      context: Of the longest row.
      unequal: The name of the rows' lengths in UNEQUAL; "" if all have `context`.
      dtype: Of the pools, "int8" with scales and offsets, "uint8" (fp8) with scales.
    """

    batch: int
    context: int
    group_size: int
    block_size: int
    num_kv_heads: int = 8
    head_dim: int = 128
    unequal: str = ""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        rows = self.unequal or f"{self.batch} x {context}"
        head = "" if self.head_dim == 128 else f", head {self.head_dim}"
        dtype = ("", *NAMES_OF_8_BITS)[("bfloat16", "int8", "uint8").index(self.dtype)]
        return f"{rows}, group {self.group_size}, block {self.block_size}{head}{dtype}"

    @property
    def lens(self) -> tuple[int, ...]:
        return UNEQUAL[self.unequal] if self.unequal else (self.context,) * self.batch

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that one launch must read, each once, and of what lies beside them."""
        key_bytes = {"bfloat16": 2 * self.head_dim, "int8": self.head_dim + 6, "uint8": self.head_dim + 4}
        return 2 * sum(self.lens) * self.num_kv_heads * key_bytes[self.dtype]

    @property
    def num_columns(self) -> int:
        return self.context // self.block_size

    @property
    def num_blocks(self) -> int:
        """Of one buffer: what the rows own, and two that none does."""
        return sum(self.lens) // self.block_size + NUM_UNOWNED

    @property
    def num_buffers(self) -> int:
        return max(1, -(-ROTATED_BYTES // self.kv_bytes))


def all_cells() -> list[Cell]:
    """Every combination, the most important ones first: before all, those that have a bar of their own."""
    ranked = [
        (4 * (nth_group + nth_block) + nth_shape, Cell(*shape, group_size, block_size))
        for nth_block, block_size in enumerate(BLOCK_SIZES)
        for nth_group, group_size in enumerate(GROUP_SIZES)
        for nth_shape, shape in enumerate(SHAPES)
    ]
    ranked += [(nth, cell) for nth, cell in enumerate((*PLANNED, *EIGHT_BITS))]
    ranked.sort(key=lambda entry: (entry[1].kv_bytes < LARGE_BYTES, entry[0]))
    return [cell for _, cell in ranked]


def _log_normal(num_rows: int) -> tuple[int, ...]:
    """Lengths of rows, a few of which are much longer than the rest; in whole blocks."""
    draw = random.Random(1)
    lens = (int(draw.lognormvariate(8, 1)) for _ in range(num_rows))
    return tuple(min(131072, max(128, -(-length // 128) * 128)) for length in lens)


UNEQUAL = {
    "63 x 1k + 1 x 128k": (1024,) * 63 + (131072,),
    "128 log-normal": _log_normal(128),
    "16 and 96": (16, 96),
}
"""Lengths of the rows of a cell, in whole blocks."""
_LONGEST = max(UNEQUAL["128 log-normal"])
PLANNED = (
    Cell(64, 131072, 4, 16, unequal="63 x 1k + 1 x 128k"),
    Cell(128, _LONGEST, 4, 16, unequal="128 log-normal"),
    Cell(128, _LONGEST, 4, 16, head_dim=64, unequal="128 log-normal"),
    Cell(50, 8192, 4, 16),
    Cell(8, 2048, 4, 16),
)
"""Those that show whether a plan fills the GPU; see `tests/kernels/test_decode_plan.py`."""
EIGHT_BITS = tuple(
    Cell(32, 8192, 4, block_size, dtype=dtype) for dtype in ("int8", "uint8") for block_size in (16, 64)
)
QUICK = (
    Cell(32, 8192, 4, 16),
    *PLANNED[:2],
    Cell(50, 8192, 4, 16),
    Cell(8, 8192, 4, 16),
    Cell(128, 1024, 4, 16),
    *EIGHT_BITS,
    Cell(1, 32768, 8, 64),
    Cell(8, 32768, 1, 128),
    Cell(1, 1024, 4, 16),
)
TINY = (
    Cell(2, 96, 4, 16, num_kv_heads=2),
    Cell(1, 128, 1, 64, num_kv_heads=1),
    Cell(2, 96, 4, 16, num_kv_heads=1, unequal="16 and 96"),
    Cell(1, 96, 4, 16, num_kv_heads=1, dtype="int8"),
)
"""For the interpreter."""
