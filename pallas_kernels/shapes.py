"""Named problems, shared by the tests, the compile gates and the benchmarks."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.eight_bits import NUMBERS, WIDENED, Scaling


class DecodeProblem(NamedTuple):
    """The arguments of one `paged_decode`."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_table: jax.Array
    rows: DecodeRows
    options: DecodeOptions
    layer: int
    sink_logits: jax.Array | None
    scaling: Scaling | None = None

    @property
    def more(self) -> dict[str, Any]:
        """The arguments that are given by name."""
        scaling = {} if self.scaling is None else {"scaling": self.scaling}
        return {"layer": self.layer, "sink_logits": self.sink_logits, **scaling}


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """A decode of rows that hold `lens` tokens, the `num_queries` last of which ask.

    A row of length 0 is idle. With a window, blocks that no query reaches are not in the table. The dtype is
    the pools'; "int8" with scales and offsets, "uint8" with scales.
    """

    name: str
    lens: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    block_size: int = 16
    num_queries: int = 1
    num_layers: int = 2
    dtype: str = "bfloat16"
    soft_cap: float | None = None
    window: int | None = None
    num_sink_tokens: int = 0
    has_sink_logits: bool = False

    @property
    def num_columns(self) -> int:
        """Columns that the longest row fills."""
        return max(1, -(-max(self.lens) // self.block_size))

    @property
    def num_blocks(self) -> int:
        """Blocks of one layer: the blocks of the rows, and two without owner."""
        return 2 + sum(-(-length // self.block_size) for length in self.lens)

    @property
    def options(self) -> DecodeOptions:
        """The static arguments."""
        scale = 1 / math.sqrt(self.head_dim)
        return DecodeOptions(self.num_blocks, scale, self.soft_cap, self.window, self.num_sink_tokens)

    def rows(self) -> DecodeRows:
        """Row `i` uses row `-1 - i` of the table, and reads what its first query reaches.

        The indices of idle rows are far out of range.
        """
        lens = np.array(self.lens, np.int32)
        num_queries = np.minimum(lens, self.num_queries)
        first_position = lens - num_queries
        sinks = self.options.num_sink_blocks(self.block_size)
        first = np.full_like(lens, sinks)
        if self.window is not None:
            first = np.maximum(first, (first_position - self.window + 1) // self.block_size)
        held = -(-lens // self.block_size)
        num_columns = np.minimum(held, sinks) + np.maximum(held - first, 0)
        table_row = len(lens) - np.arange(len(lens), dtype=np.int32)
        for indices in (table_row, first, first_position):
            indices[lens == 0] = 10**8 * (-1) ** np.arange(np.sum(lens == 0))
        return DecodeRows(
            table_row=jnp.asarray(table_row),
            first_column=jnp.asarray(first),
            num_columns=jnp.asarray(num_columns),
            first_position=jnp.asarray(first_position),
            num_queries=jnp.asarray(num_queries),
        )

    def problem(self, seed: int = 0) -> DecodeProblem:
        """Random data: a permuted table, entries that are not read out of range, unowned slots NaN.

        The table has a row more than are read, and a column unless there is one row. The layer is the last
        one, and all others are NaN.
        """
        rng = np.random.default_rng(seed)
        is_scaled = self.dtype in NUMBERS
        dtype = jnp.dtype(WIDENED if is_scaled else self.dtype)
        rows = self.rows()
        table_row, first_column, num_columns, *_ = map(np.asarray, rows)
        table_shape = (len(self.lens) + 1, self.num_columns + (len(self.lens) > 1))
        table = np.full(table_shape, self.num_blocks, np.int32)
        pool_shape = (self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        k_pool, v_pool = (np.full(pool_shape, np.nan, np.float32) for _ in "kv")
        free = list(rng.permutation(self.num_blocks))
        sinks = self.options.num_sink_blocks(self.block_size)
        for row, length in enumerate(self.lens):
            for nth in range(num_columns[row]):
                column = nth if nth < sinks else first_column[row] + nth - sinks
                table[table_row[row], column] = block = free.pop()
                tokens = min(self.block_size, length - column * self.block_size)
                for pool in (k_pool, v_pool):
                    values = rng.standard_normal((self.num_kv_heads, tokens, self.head_dim))
                    pool[-1, block, :, :tokens] = values
        q_shape = (len(self.lens), self.num_queries, self.num_kv_heads, self.group_size, self.head_dim)
        sink_logits = None
        if self.has_sink_logits:
            sink_logits = jnp.asarray(rng.standard_normal(q_shape[2:4]).astype(np.float32))
        k_pool, v_pool = (pool.reshape(-1, *pool_shape[2:]) for pool in (k_pool, v_pool))
        scaling = None
        if is_scaled:
            (k_pool, *of_keys), (v_pool, *of_values) = (self._stored(rng, x) for x in (k_pool, v_pool))
            pairs = zip(of_keys, of_values, strict=True)
            scaling = Scaling(*(jnp.asarray(array) for pair in pairs for array in pair))
        return DecodeProblem(
            q=jnp.asarray(rng.standard_normal(q_shape).astype(dtype)),
            k_pool=jnp.asarray(k_pool if is_scaled else k_pool.astype(dtype)),
            v_pool=jnp.asarray(v_pool if is_scaled else v_pool.astype(dtype)),
            block_table=jnp.asarray(table),
            rows=rows,
            options=self.options,
            layer=self.num_layers - 1,
            sink_logits=sink_logits,
            scaling=scaling,
        )

    def _stored(self, rng: np.random.Generator, values: np.ndarray) -> list[np.ndarray]:
        """Rounds values to 8 bits with random scales, and offsets; of a NaN all is NaN that can be."""
        scale = rng.uniform(1 / 60, 1 / 20, values.shape[:3]).astype(np.float32)
        scale[np.isnan(values[..., 0])] = np.nan
        if self.dtype == "uint8":
            return [np.asarray(values / scale[..., None], jnp.float8_e4m3fn).view(np.uint8), scale]
        offset = scale * rng.integers(-30, 30, scale.shape)
        numbers = np.round((values - offset[..., None]) / scale[..., None])
        numbers = np.where(np.isnan(numbers), rng.integers(-128, 128, numbers.shape), numbers)
        bits = (scale.view(np.uint32) >> 15).astype(np.uint16)
        return [np.clip(numbers, -128, 127).astype(np.int8), bits, offset.astype(np.float32)]


DECODE_SHAPES = (
    DecodeShape("plain", (63, 5)),
    DecodeShape("idle_rows", (0, 70, 0, 1, 16, 17)),
    DecodeShape("long", (530, 64), num_kv_heads=1),
    DecodeShape("group_1_block_8", (61,), group_size=1, block_size=8),
    DecodeShape("group_16_soft_cap", (60,), group_size=16, num_kv_heads=1, soft_cap=5.0),
    DecodeShape("head_128_block_24", (100, 24), head_dim=128, block_size=24, num_kv_heads=1),
    DecodeShape("head_256_f16", (45,), head_dim=256, num_kv_heads=1, dtype="float16"),
    DecodeShape("block_128", (200, 128), block_size=128, num_kv_heads=1),
    DecodeShape("block_72_f16", (150,), block_size=72, num_kv_heads=1, dtype="float16"),
    DecodeShape("block_512", (700, 512), block_size=512, num_kv_heads=1),
    DecodeShape("drafts", (66, 3, 20), num_queries=5, group_size=3),
    DecodeShape("drafts_3x8", (40,), num_queries=3, group_size=8, num_kv_heads=1),
    DecodeShape("drafts_7x16", (90,), num_queries=7, group_size=16, num_kv_heads=1),
    DecodeShape("window_drafts", (98, 202, 30), window=70, num_queries=4),
    DecodeShape("kept_tokens", (230, 21, 3), window=40, num_sink_tokens=5),
    DecodeShape("sink_logits", (530, 0), has_sink_logits=True),
    DecodeShape(
        "all",
        (201, 64, 0, 7),
        num_queries=3,
        window=70,
        num_sink_tokens=20,
        soft_cap=3.0,
        has_sink_logits=True,
    ),
)
"""Small enough to interpret, one or two hard things each, and all of them together."""


EIGHT_BIT_SHAPES = (
    DecodeShape("int8", (63, 5, 0), dtype="int8"),
    DecodeShape("fp8", (70, 17), dtype="uint8"),
    DecodeShape("int8_long", (530, 64), num_kv_heads=1, block_size=64, dtype="int8"),
    DecodeShape("fp8_block_128", (200, 128), num_kv_heads=1, block_size=128, dtype="uint8"),
    DecodeShape("int8_block_8_head_128", (101,), group_size=1, block_size=8, head_dim=128, dtype="int8"),
    DecodeShape("fp8_head_128_block_24", (100,), num_kv_heads=1, block_size=24, head_dim=128, dtype="uint8"),
    DecodeShape(
        "int8_all",
        (201, 64, 0, 7),
        num_queries=3,
        block_size=32,
        window=70,
        num_sink_tokens=20,
        soft_cap=3.0,
        has_sink_logits=True,
        dtype="int8",
    ),
    DecodeShape("fp8_drafts_7x16", (90,), num_queries=7, group_size=16, num_kv_heads=1, dtype="uint8"),
)
"""Likewise, of 8 bits."""

PREFILL_SHAPES = (
    DecodeShape("plain", (200, 70), num_kv_heads=1, group_size=2, num_queries=80),
    DecodeShape("idle_rows", (0, 66, 0, 1), group_size=1, dtype="float16", num_queries=66),
    DecodeShape("long", (700,), num_kv_heads=1, group_size=1, block_size=64, num_queries=70),
    DecodeShape("head_128_group_3", (300,), 1, group_size=3, head_dim=128, block_size=128, num_queries=130),
    DecodeShape("block_48", (150, 149), 1, group_size=2, head_dim=128, block_size=48, num_queries=64),
    DecodeShape("block_512", (700,), 1, group_size=2, block_size=512, num_queries=9),
    DecodeShape("window", (530, 90), 1, group_size=1, num_queries=150, window=70),
    DecodeShape("kept_tokens", (620, 130), 1, group_size=2, num_queries=70, window=40, num_sink_tokens=140),
    DecodeShape(
        "all",
        (401, 64, 0, 7),
        group_size=2,
        block_size=48,
        num_queries=130,
        window=70,
        num_sink_tokens=20,
        soft_cap=3.0,
        has_sink_logits=True,
    ),
)
"""Likewise, of many queries a row: for the prefill."""

EIGHT_BIT_PREFILLS = (
    DecodeShape("int8", (200, 70), 1, group_size=2, num_queries=80, dtype="int8"),
    DecodeShape("fp8", (300,), 1, group_size=1, head_dim=128, num_queries=70, dtype="uint8"),
    DecodeShape("int8_head_128_block_128", (300,), 1, 1, 128, 128, num_queries=66, dtype="int8"),
    DecodeShape(
        "int8_all",
        (401, 64, 0, 7),
        group_size=2,
        block_size=48,
        num_queries=130,
        window=70,
        num_sink_tokens=20,
        soft_cap=3.0,
        has_sink_logits=True,
        dtype="int8",
    ),
    DecodeShape("fp8_window", (530, 90), 2, 1, block_size=32, num_queries=150, window=70, dtype="uint8"),
)
"""Likewise, of 8 bits."""
