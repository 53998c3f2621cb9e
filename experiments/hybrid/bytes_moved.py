"""The bytes of pools that a decode step of one recurrent layer moves, counted from its traced program.

The layer is Qwen3-Next's, one row, W = 16, bfloat16 (states in float32). A gather from an array of a pool
counts by what it reads, a scatter by what it writes. The loop that folds a full block runs once per row and W
tokens. States are the matrices and what tokens change of them; inputs of the convolution are apart.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv

QWEN3_NEXT = kv.GatedDeltaNet(32, 128, key_dim=128, num_key_heads=16)
"""Its recurrent layers, 36 of 48."""
NUM_RECURRENT, BLOCK_SIZE = 36, 16
_CONVOLUTION = "inputs"


def point_bytes() -> int:
    """Counts the bytes of a snapshot."""
    return sum(group.block_bytes for group in _config(NUM_RECURRENT).snapshot_groups.values())


def of_decode() -> dict[str, float]:
    """Counts the bytes per token and layer, of states and of the convolution's inputs, by what moves them."""
    kind, config = QWEN3_NEXT, _config(1)
    cache = jax.eval_shape(lambda: kv.init(config))

    def step_of(cache: kv.Cache) -> tuple[kv.Cache, kv.Step]:
        return kv.extend(cache, [1], max_new=1, tokens=jnp.zeros((1, 1), jnp.int32))

    cache, step = jax.eval_shape(step_of, cache)
    shapes = {"x": kind.num_channels, "g": kind.num_kv_heads, "beta": kind.num_kv_heads}
    new = {name: jax.ShapeDtypeStruct((1, 1, n), config.dtype) for name, n in shapes.items()}
    conv = jax.ShapeDtypeStruct((kind.kernel, kind.num_channels), config.dtype)

    def layer(cache: kv.Cache, new: Any, step: kv.Step, conv: jax.Array) -> Any:
        return kv.recurrence(cache, 1, new, step, weights={"conv": conv})

    names: dict[tuple[int, ...], str] = {}
    for g in (g for g, group in enumerate(config.groups) if "GatedDeltaNet" in group.kind.label):
        for name, array in cache.pools[g].arrays.items():
            names[array.shape] = _CONVOLUTION if name == _CONVOLUTION else "state"
    moved: dict[str, float] = {}
    for name, what, num_bytes, share in _moves(jax.make_jaxpr(layer)(cache, new, step, conv).jaxpr, names):
        key = f"{name} {what}"
        moved[key] = moved.get(key, 0) + num_bytes * share
    return moved


def _config(num_layers: int) -> kv.CacheConfig:
    return kv.CacheConfig(
        [kv.FullAttention(1, 16), *[QWEN3_NEXT] * num_layers],
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_seqs=1,
        max_seq_len=1024,
        dtype=jnp.bfloat16,
        enable_prefix_caching=True,
    )


def _moves(
    jaxpr: Any, names: Mapping[tuple[int, ...], str], is_fold: bool = False
) -> Iterator[tuple[str, str, int, float]]:
    """Lists the array, what is done, bytes, and how often per token."""
    share = 1 / BLOCK_SIZE if is_fold else 1
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        array: Any = eqn.invars[0].aval if kind.startswith(("gather", "scatter")) else None
        name = None if array is None else names.get(array.shape)
        if name is not None:
            moved: Any = eqn.outvars[0].aval if kind == "gather" else eqn.invars[2].aval
            what = "folded" if is_fold else "read" if kind == "gather" else "written"
            yield name, what, moved.size * moved.dtype.itemsize, share
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_program):
            if _is_program(inner):
                yield from _moves(getattr(inner, "jaxpr", inner), names, is_fold or kind == "while")


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")  # closed over constants or not
