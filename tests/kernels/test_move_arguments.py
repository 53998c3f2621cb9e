"""Arguments that the movement kernels refuse: those that fit no kernel, and those that fit no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_tpu

pytestmark = pytest.mark.contract


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


i32 = functools.partial(shape, dtype="int32")
POOL = shape(12, 2, 16, 128)
GATHER = dict(k_pool=POOL, v_pool=POOL, block_ids=i32(3))
COPY = dict(k_pool=POOL, v_pool=POOL, src=i32(3), dst=i32(3), count=i32())
SCATTER = GATHER | dict(k=shape(3, 3, 2, 16, 128), v=shape(3, 3, 2, 16, 128))
APPEND = dict(k_pool=POOL, v_pool=POOL, k=shape(5, 2, 128), v=shape(5, 2, 128), slots=i32(5))


def both(pool: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(k_pool=pool, v_pool=pool)


@pytest.mark.parametrize(
    ("kernel", "arguments", "expected"),
    [
        ("gather_blocks", GATHER | dict(v_pool=shape(12, 2, 8, 128)), "expected two equal"),
        (
            "gather_blocks",
            GATHER | both(shape(13, 2, 16, 128)),
            "13 blocks, expected a multiple of num_blocks",
        ),
        ("copy_blocks", COPY | dict(count=i32(1)), r"count is int32\(1,\), expected an int32 scalar"),
        ("copy_blocks", COPY | dict(count=shape(dtype="float32")), r"count is float32\(\)"),
        (
            "gather_blocks",
            GATHER | dict(block_ids=i32(3, 1)),
            r"block_ids is int32\(3, 1\), expected int32\[n\]",
        ),
        ("copy_blocks", COPY | dict(dst=i32(4)), r"dst is int32\(4,\), expected int32\[3\]"),
        (
            "copy_blocks",
            COPY | dict(src=shape(3, dtype="uint32")),
            r"src is uint32\(3,\), expected int32\[n\]",
        ),
        (
            "scatter_blocks",
            SCATTER | dict(k=shape(4, 3, 2, 16, 128)),
            r"k has shape \(4, 3, .* = \(3, 3, 2, 16",
        ),
        (
            "scatter_blocks",
            SCATTER | dict(v=shape(2, 3, 2, 16, 128)),
            r"v has shape \(2, 3, .* = \(3, 3, 2, 16",
        ),
        (
            "gather_blocks",
            GATHER | both(shape(12, 0, 16, 128)),
            r"pools have shape \(12, 0, 16, 128\), expected no axis of length 0",
        ),
        (
            "append_kv",
            APPEND | dict(layer=shape(dtype="float32")),
            r"layer is float32\(\), expected an integer",
        ),
        (
            "append_kv",
            APPEND | dict(k=shape(5, 2, 128, dtype="complex64")),
            "k is complex64, expected real numbers",
        ),
        (
            "scatter_blocks",
            SCATTER | dict(v=shape(3, 3, 2, 16, 128, dtype="complex64")),
            "v is complex64, expected real",
        ),
        ("append_kv", APPEND | dict(slots=i32(5, 1)), r"slots is int32\(5, 1\), expected int32\[n\]"),
        (
            "append_kv",
            APPEND | dict(k=shape(5, 2, 64)),
            r"k has shape \(5, 2, 64\), expected .* = \(5, 2, 128\)",
        ),
        (
            "append_kv",
            APPEND | dict(v=shape(4, 2, 128)),
            r"v has shape \(4, 2, 128\), expected .* = \(5, 2, 128\)",
        ),
        # What fits together and fits no TPU.
        ("gather_blocks", GATHER | both(shape(12, 2, 16, 64)), "head_dim is 64, expected a multiple of 128"),
        ("copy_blocks", COPY | both(shape(12, 2, 8, 128)), "block_size is 8, expected a multiple of 16"),
        (
            "scatter_blocks",
            SCATTER | both(shape(12, 2, 16, 128, dtype="float16")),
            "the pools are float16, expected bfloat16 or float32",
        ),
        ("append_kv", APPEND | both(shape(12, 2, 24, 128)), "block_size is 24, expected a multiple of 16"),
        (
            "copy_blocks",
            COPY | dict(src=i32(150_000), dst=i32(150_000)),
            "has 300000 entries, expected at most",
        ),
        (
            "append_kv",
            dict(k=shape(150_000, 2, 128), v=shape(150_000, 2, 128), slots=i32(150_000)) | both(POOL),
            "slots has 300032 entries, expected at most 245760",
        ),
        (
            "append_kv",
            dict(k=shape(1, 1500, 128), v=shape(1, 1500, 128), slots=i32(1)) | both(shape(4, 1500, 16, 128)),
            "16 tokens have 6144000 bytes of keys, expected at most 4194304",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kernel, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        jax.eval_shape(functools.partial(getattr(mosaic_tpu, kernel), num_blocks=4), **arguments)


@pytest.mark.parametrize(
    ("kernel", "statics", "expected"),
    [
        ("append_kv", dict(layer=3), "layer is 3, expected 0 <= layer < 3"),
        ("append_kv", dict(layer=-1), "layer is -1, expected 0 <= layer < 3"),
        ("copy_blocks", dict(count=np.int32(4)), "count is 4, expected 0 to 3, the number of ids"),
        ("gather_blocks", dict(num_blocks=4.0), "num_blocks is 4.0, expected an integer"),
    ],
)
def test_what_is_known_when_it_is_traced_is_refused(kernel, statics, expected):
    arguments = {"append_kv": APPEND, "copy_blocks": COPY, "gather_blocks": GATHER}[kernel]
    shapes = {name: value for name, value in arguments.items() if name not in statics}
    with pytest.raises(ValueError, match=expected):
        jax.eval_shape(
            functools.partial(getattr(mosaic_tpu, kernel), **{"num_blocks": 4} | statics), **shapes
        )


def test_no_blocks_are_gathered():
    arguments = GATHER | dict(block_ids=i32(0))
    k, v = jax.eval_shape(functools.partial(mosaic_tpu.gather_blocks, num_blocks=4), **arguments)
    assert k.shape == v.shape == (0, 3, 2, 16, 128)
