"""What `experiments.kernel_speed` decodes: the cells, and their order; the steps. Only Python."""

from typing import NamedTuple

# By importance: the shapes first that fill a GPU.
SHAPES = (
    (32, 8192),
    (128, 8192),
    (8, 32768),
    (32, 32768),
    (128, 1024),
    (1, 32768),
    (8, 8192),
    (32, 1024),
    (128, 32768),
    (1, 8192),
    (8, 1024),
    (1, 1024),
)
"""(batch, context)."""
GROUP_SIZES, BLOCK_SIZES = (4, 8, 1), (16, 64, 128)
ROTATED_BYTES = 10**9
"""K and V of all buffers that launches take turns in, at least; an H200 has 60 MB of L2."""
LARGE_BYTES = 3 * 10**8
"""A launch that reads so much is to reach the read bandwidth; below, fixed costs count."""
NUM_UNOWNED = 2
"""Blocks of a buffer that belong to no row."""


class Cell(NamedTuple):
    """One decode: `batch` rows, each with one query, over `context` tokens in whole blocks."""

    batch: int
    context: int
    group_size: int
    block_size: int
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {context}, group {self.group_size}, block {self.block_size}"

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that one launch must read, each once; bfloat16."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * 2

    @property
    def num_columns(self) -> int:
        return self.context // self.block_size

    @property
    def num_blocks(self) -> int:
        """Of one buffer: what the rows own, and two that nobody does."""
        return self.batch * self.num_columns + NUM_UNOWNED

    @property
    def num_buffers(self) -> int:
        return max(1, -(-ROTATED_BYTES // self.kv_bytes))

    @property
    def needed_bytes(self) -> int:
        """Device memory of the sides together: three copies of the buffers (JAX's Triton kernel wants another
        layout, and cuDNN each alone), blocks gathered once, and once more in another order."""
        return 3 * self.num_buffers * self.kv_bytes + 2 * self.kv_bytes


def all_cells() -> list[Cell]:
    """Every combination, the most important ones first: before all, those that have a bar of their own."""
    ranked = [
        (4 * (nth_group + nth_block) + nth_shape, Cell(*shape, group_size, block_size))
        for nth_block, block_size in enumerate(BLOCK_SIZES)
        for nth_group, group_size in enumerate(GROUP_SIZES)
        for nth_shape, shape in enumerate(SHAPES)
    ]
    ranked.sort(key=lambda entry: (entry[1].kv_bytes < LARGE_BYTES, entry[0]))
    return [cell for _, cell in ranked]


QUICK = (
    Cell(32, 8192, 4, 16),
    Cell(128, 1024, 4, 16),
    Cell(1, 32768, 8, 64),
    Cell(8, 32768, 1, 128),
    Cell(1, 1024, 4, 16),
)
TINY = (Cell(2, 96, 4, 16, num_kv_heads=2), Cell(1, 128, 1, 64, num_kv_heads=1))
"""For the interpreter."""


class StepSizes(NamedTuple):
    """A decoder's rows, and the tokens that each holds after the last step of a sample."""

    batch: int
    context: int
    num_steps: int = 32
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"step of {self.batch} x {self.context} tokens"

    @property
    def start_len(self) -> int:
        return self.context - self.num_steps


STEPS = (StepSizes(32, 8192), StepSizes(1, 8192))
TINY_STEPS = (StepSizes(2, 32, num_steps=1),)
