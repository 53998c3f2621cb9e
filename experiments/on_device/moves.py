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
from experiments.on_device.contests import COPY, READ, Contest, Makers, Program, Side, launches_for
from experiments.on_device.problem import random_pool
from experiments.on_device.sides import looped
from pallas_kernels import reference
from pallas_kernels.eight_bits import Scaling

NUM_BUFFERS = 4


def ceiling_makers(buffer_len: int = 1 << 27) -> Makers:
    """What a launch costs, how fast memory is read, and how fast it is read and written."""
    return {
        contests.FLOOR: _floor,
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
    return contest, [Side(contests.XLA, xla_sum), Side(contests.PYTORCH, torch_sum)]


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
    return contest, [Side(contests.XLA, xla_add)]


def _floor() -> tuple[Contest, list[Side]]:
    """A launch that does next to nothing."""
    x = jnp.zeros((8, 128), jnp.float32)

    def add(x: jax.Array, _, buffer: jax.Array, zero: jax.Array) -> jax.Array:
        return x + (buffer + zero).astype(x.dtype)

    contest = Contest(contests.FLOOR, 0, lambda _: 0.0, 0.0, launches_for(0))
    return contest, [Side(contests.XLA, functools.partial(looped, add, x, (), NUM_BUFFERS))]


def _in_place(loop: Callable, state: Any, inputs: Any = (), interpret: bool = False) -> Program:
    """`state = loop(state, inputs)`, the state donated; sample after sample goes on from there."""
    program = contests.compiled(loop, state, inputs, donate_argnums=0)
    held = [state]
    del state

    def run() -> Any:
        held.append(program(held.pop(), inputs))
        return held[0]

    return contests.jax_program(run, interpret, result=lambda state: state)


class Pools(NamedTuple):
    """Sizes of the pools in which tokens and blocks are moved, bfloat16; of int8 with scales and offsets."""

    num_layers: int = 8
    num_blocks: int = 2048
    num_kv_heads: int = 8
    block_size: int = 16
    head_dim: int = 128
    is_scaled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers * self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one layer."""
        number_bytes = self.head_dim + 2 + 4 if self.is_scaled else self.head_dim * 2
        return 2 * self.num_kv_heads * number_bytes

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        return self.num_layers * self.block_size * self.token_bytes

    def draw(self, seed: int, shape: tuple[int, ...]) -> tuple:
        """Keys and values, and in `Scaling` what lies beside them."""
        keys = jax.random.split(jax.random.key(seed), 4)
        if not self.is_scaled:
            return random_pool(keys[0], shape), random_pool(keys[1], shape)
        k, v = (jax.random.bits(key, shape, jnp.uint8).astype(jnp.int8) for key in keys[:2])
        beside = [jax.random.bits(key, (2, *shape[:-1]), jnp.uint16) for key in keys[2:]]
        return k, v, Scaling(*beside[0], *beside[1].astype(jnp.float32))


TINY_POOLS = Pools(num_layers=2, num_blocks=4, num_kv_heads=1, block_size=8, head_dim=64)


def move_makers(sizes: Pools, num_tokens: tuple[int, ...], num_moved: int, interpret: bool = False) -> Makers:
    """Appends of so many tokens to one layer, and so many blocks gathered, scattered and copied; by name."""
    move = functools.partial(_move, sizes, interpret)
    appends = {
        f"{name} {num} token{'s' * (num > 1)}": (kernel, num)
        for num in num_tokens
        for name, kernel in (("append", "append_kv"), ("append_scaled", "append_scaled"))
    }
    others = {
        f"{kernel.partition('_')[0]} {num_moved} blocks of {sizes.num_layers} layers": (kernel, num_moved)
        for kernel in ("gather_blocks", "scatter_blocks", "copy_blocks")
    }
    moves = {**appends, **others}
    return {name: functools.partial(move, name, *moves[name]) for name in moves}


def _move(sizes: Pools, interpret: bool, name: str, kernel: str, num: int) -> tuple[Contest, list[Side]]:
    """`num` tokens or blocks, moved by a kernel and by the reference.

    The error is the share of the elements that are not the reference's.
    """
    is_append, is_gather = kernel.startswith("append"), kernel == "gather_blocks"
    sizes = sizes._replace(is_scaled=kernel == "append_scaled")
    num_places = sizes.num_blocks * (sizes.block_size if is_append else 1)
    num_bytes = 2 * num * (sizes.token_bytes if is_append else sizes.block_bytes)
    num_launches = launches_for(num_bytes)
    if interpret:
        num_launches = sizes.num_layers if is_append else 1
    order = np.random.default_rng(0).permutation(num_places).astype(np.int32)
    src, dst, count = jnp.asarray(order[:num]), jnp.asarray(order[num : 2 * num]), jnp.int32(num)
    outside = (num, *sizes.shape[1::2]) if is_append else (num, sizes.num_layers, *sizes.shape[1:])

    inputs = {"gather_blocks": (src,), "copy_blocks": (src, dst, count)}.get(kernel)
    if inputs is None:
        inputs = *sizes.draw(2, outside), src if is_append else dst

    def start() -> tuple:
        results = tuple(jnp.zeros(outside, jnp.bfloat16) for _ in "kv") if is_gather else ()
        return sizes.draw(1, sizes.shape), results

    def loop(kernels: Any, options: dict, state: tuple, inputs: tuple) -> tuple:
        call = functools.partial(getattr(kernels, kernel), num_blocks=sizes.num_blocks, **options)

        def body(nth: jax.Array, state: tuple) -> tuple:
            pools, results = state
            if is_append:
                return call(*pools, *inputs, layer=lax.rem(nth, jnp.int32(sizes.num_layers))), results
            if not is_gather:
                return call(*pools, *inputs), results
            # What all launches have in common may be moved out of the loop.
            zero = jnp.isnan(results[0].reshape(-1)[0]).astype(jnp.int32)
            (ids,) = inputs
            return pools, call(*pools, ids + zero)

        return lax.fori_loop(0, num_launches, body, state)

    by_reference = functools.partial(loop, reference, {})

    def ours(_) -> Program:
        from pallas_kernels import mosaic_gpu

        options = {"interpret": True} if interpret else {}
        return _in_place(functools.partial(loop, mosaic_gpu, options), start(), inputs, interpret)

    def error_of(state: tuple) -> float:
        expected = jax.jit(by_reference)(start(), inputs)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        return max(float((got != wanted).mean()) for got, wanted in pairs)

    contest = Contest(name, num_bytes, error_of, 0.0, num_launches)
    xla = Side(contests.XLA, lambda _: _in_place(by_reference, start(), inputs))
    return contest, [Side(contests.OURS, ours, is_ours=True), xla]
