"""What `experiments.first_gpu_run` times beside decodes: the memory's ceilings, and the movement of tokens
and blocks by our kernels, beside XLA's scatter and gather.

The kernels must give the same bits as `pallas_kernels.reference`, which is also the XLA side. Pools are
updated in place, layer after layer where only one is written.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.on_device import contests, torch_sides
from experiments.on_device.contests import (
    COPY,
    FLOOR,
    OURS,
    PYTORCH,
    READ,
    XLA,
    Contest,
    Makers,
    Program,
    Side,
    launches_for,
)
from experiments.on_device.problem import random_pool
from experiments.on_device.sides import looped
from pallas_kernels import reference

NUM_BUFFERS = 4


def ceiling_makers(buffer_len: int = 1 << 27) -> Makers:
    """What a launch costs, how fast memory is read, and how fast it is read and written."""
    return {
        FLOOR: _floor,
        READ: functools.partial(_read, buffer_len),
        COPY: functools.partial(_copy, buffer_len),
    }


def _buffers(buffer_len: int) -> jax.Array:
    return jax.random.uniform(jax.random.key(0), (NUM_BUFFERS, buffer_len), jnp.float32)


def _read(buffer_len: int) -> tuple[Contest, list[Side]]:
    """Sums buffer after buffer."""
    buffers = _buffers(buffer_len)
    num_bytes = 4 * buffer_len
    num_launches = launches_for(num_bytes)
    total = float(np.asarray(buffers[(num_launches - 1) % NUM_BUFFERS]).sum(dtype=np.float64))

    def sum_loop(buffers: jax.Array) -> jax.Array:
        def body(nth, _):
            return buffers[lax.rem(nth, NUM_BUFFERS)].sum()

        return lax.fori_loop(0, num_launches, body, jnp.float32(0))

    def xla_sum(_) -> Program:
        program = contests.compiled(sum_loop, buffers)
        return Program(lambda: program(buffers), jax.block_until_ready, float)

    def torch_sum(_) -> Program:
        tensor = torch_sides.as_tensor(buffers)
        return torch_sides.captured(lambda nth: tensor[nth % NUM_BUFFERS].sum(), num_launches)

    contest = Contest(READ, num_bytes, lambda got: abs(float(got) / total - 1), 1e-3, num_launches)
    return contest, [Side(XLA, xla_sum), Side(PYTORCH, torch_sum)]


def _copy(buffer_len: int) -> tuple[Contest, list[Side]]:
    """Adds to all buffers, so that fewer launches make a sample."""
    buffers = _buffers(buffer_len)
    first = np.asarray(buffers[0, :1024])
    num_copies = launches_for(2 * buffers.nbytes)

    def xla_add(_) -> Program:
        def loop(buffers, _):
            return lax.fori_loop(0, num_copies, lambda _, x: x + 1, buffers)

        program = _in_place(loop, buffers.copy())
        return program._replace(result=lambda state: np.asarray(state[0, :1024]))

    contest = Contest(
        COPY, 2 * buffers.nbytes, lambda got: float(np.abs(got - first - num_copies).max()), 1e-3, num_copies
    )
    return contest, [Side(XLA, xla_add)]


def _floor() -> tuple[Contest, list[Side]]:
    """A launch that does next to nothing."""
    x = jnp.zeros((8, 128), jnp.float32)

    def add(x: jax.Array, _, buffer: jax.Array, zero: jax.Array) -> jax.Array:
        return x + (buffer + zero).astype(x.dtype)

    contest = Contest(FLOOR, 0, lambda _: 0.0, 0.0, launches_for(0))
    return contest, [Side(XLA, functools.partial(looped, add, x, (), NUM_BUFFERS))]


def _in_place(loop: Callable, state: Any, inputs: Any = ()) -> Program:
    """`state = loop(state, inputs)`, the state donated; sample after sample goes on from there."""
    program = contests.compiled(loop, state, inputs, donate_argnums=0)
    held = [state]
    del state

    def run() -> Any:
        held.append(program(held.pop(), inputs))
        return held[0]

    return Program(run, jax.block_until_ready, lambda state: state)


class Pools(NamedTuple):
    """Sizes of the pools in which tokens and blocks are moved, bfloat16."""

    num_layers: int = 8
    num_blocks: int = 2048
    num_kv_heads: int = 8
    block_size: int = 16
    head_dim: int = 128

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers * self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        return self.num_layers * self.block_size * self.token_bytes

    def draw(self) -> tuple[jax.Array, jax.Array]:
        k_key, v_key = jax.random.split(jax.random.key(1))
        return random_pool(k_key, self.shape), random_pool(v_key, self.shape)


TINY_POOLS = Pools(num_layers=2, num_blocks=4, num_kv_heads=1, block_size=8, head_dim=64)


def move_makers(sizes: Pools, num_tokens: tuple[int, ...], num_moved: int, interpret: bool = False) -> Makers:
    """Appends of so many tokens, and so many blocks gathered, scattered and copied; by name.

    Args:
      sizes: Of the pools.
      num_tokens: Of each append, written into one layer.
      num_moved: Blocks of each other movement, in all layers; at most half of them.
      interpret: Run our kernels on the CPU.
    """
    makers: Makers = {}
    for num in num_tokens:
        name = f"append {num} token{'s' * (num > 1)}"
        makers[name] = functools.partial(_append, name, sizes, num, interpret)
    for kernel in ("gather_blocks", "scatter_blocks", "copy_blocks"):
        name = f"{kernel.partition('_')[0]} {num_moved} blocks of {sizes.num_layers} layers"
        makers[name] = functools.partial(_move, name, sizes, kernel, num_moved, interpret)
    return makers


def _append(name: str, sizes: Pools, num_tokens: int, interpret: bool) -> tuple[Contest, list[Side]]:
    num_bytes = 2 * num_tokens * sizes.token_bytes
    num_launches = launches_for(num_bytes) if not interpret else sizes.num_layers
    order = np.random.default_rng(0).permutation(sizes.num_blocks * sizes.block_size)
    k, v = (random_pool(jax.random.key(i), (num_tokens, *sizes.shape[1::2])) for i in (2, 3))
    inputs = k, v, jnp.asarray(order[:num_tokens], jnp.int32)

    def step(kernels: Any, options: dict, pools: tuple, inputs: tuple, nth: jax.Array) -> tuple:
        layer = lax.rem(nth, jnp.int32(sizes.num_layers))
        return kernels.append_kv(*pools, *inputs, num_blocks=sizes.num_blocks, layer=layer, **options)

    return _contest(name, num_bytes, num_launches, step, sizes.draw, inputs, interpret)


def _move(
    name: str, sizes: Pools, kernel: str, num_moved: int, interpret: bool
) -> tuple[Contest, list[Side]]:
    num_bytes = 2 * num_moved * sizes.block_bytes
    num_launches = launches_for(num_bytes) if not interpret else 1
    order = np.random.default_rng(0).permutation(sizes.num_blocks).astype(np.int32)
    src, dst = jnp.asarray(order[:num_moved]), jnp.asarray(order[num_moved : 2 * num_moved])
    shape = (sizes.num_layers, num_moved, *sizes.shape[1:])
    count = jnp.int32(num_moved)

    def copied(move: Callable, pools: tuple, inputs: tuple) -> tuple:
        return move(*pools, *inputs)

    def gathered(move: Callable, state: tuple, inputs: tuple) -> tuple:
        (pools, results), (ids, count) = state, inputs
        # What all launches have in common may be moved out of the loop.
        zero = jnp.isnan(results[0].reshape(-1)[0]).astype(jnp.int32)
        return pools, move(*pools, ids, count + zero)

    if kernel == "gather_blocks":
        work, inputs = gathered, (src, count)
    elif kernel == "copy_blocks":
        work, inputs = copied, (src, dst, count)
    else:
        work, inputs = copied, (*(random_pool(jax.random.key(i), shape) for i in (2, 3)), dst, count)

    def start() -> Any:
        pools = sizes.draw()
        return (pools, tuple(jnp.zeros(shape, jnp.bfloat16) for _ in "kv")) if work is gathered else pools

    def step(kernels: Any, options: dict, state: Any, inputs: tuple, _) -> Any:
        move = functools.partial(getattr(kernels, kernel), num_blocks=sizes.num_blocks, **options)
        return work(move, state, inputs)

    return _contest(name, num_bytes, num_launches, step, start, inputs, interpret)


def _contest(
    name: str,
    num_bytes: int,
    num_launches: int,
    step: Callable,
    start: Callable[[], Any],
    inputs: tuple,
    interpret: bool,
) -> tuple[Contest, list[Side]]:
    """`state = step(kernels, options, state, inputs, nth)`, beginning with `start()`.

    The error is the share of the state's elements that are not the reference's.
    """

    def loop(kernels: Any, options: dict, state: Any, inputs: tuple) -> Any:
        def body(nth: jax.Array, state: Any) -> Any:
            return step(kernels, options, state, inputs, nth)

        return lax.fori_loop(0, num_launches, body, state)

    def ours(_) -> Program:
        from pallas_kernels import mosaic_gpu
        from pallas_kernels.mosaic_gpu.interpret import run_interpreted

        options = {"interpret": True} if interpret else {}
        program = _in_place(functools.partial(loop, mosaic_gpu, options), start(), inputs)
        return program._replace(run=lambda: run_interpreted(program.run)) if interpret else program

    def xla(_) -> Program:
        return _in_place(functools.partial(loop, reference, {}), start(), inputs)

    def error_of(state: Any) -> float:
        expected = jax.jit(functools.partial(loop, reference, {}))(start(), inputs)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        return max(float((got != wanted).mean()) for got, wanted in pairs)

    contest = Contest(name, num_bytes, error_of, 0.0, num_launches)
    return contest, [Side(OURS, ours, is_ours=True), Side(XLA, xla)]
