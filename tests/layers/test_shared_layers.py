"""Shared layers: what they refuse, and that they take no memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.config import config_from_json, config_to_json

FULL, WINDOW = kv.FullAttention(2, 4), kv.SlidingWindow(2, 4, window=5)
LAYERS = [FULL, kv.SharedWith(0), WINDOW, kv.SharedWith(2), kv.SharedWith(0), FULL]
SIZES = dict(num_blocks=6, block_size=4, max_seqs=2, max_seq_len=24)


def config(layers=LAYERS):
    return kv.CacheConfig(layers, **SIZES)


def test_they_take_no_memory_and_are_found_where_the_other_layer_is():
    assert kv.memory_bytes(config()) == kv.memory_bytes(config([FULL, WINDOW, FULL]))
    assert [config().locate(layer) for layer in range(6)] == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (0, 1)]
    assert config().own_layers == (0, 2, 5)
    assert config_from_json(config_to_json(config())) == config()
    lines = kv.describe(config()).splitlines()
    assert lines[2:4] == ["2 layers that read what layer 0 stores", "1 layers that read what layer 2 stores"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [kv.SharedWith(1), FULL],
            r"layers\[0\] is SharedWith\(1\), expected one of .*, of which there are none",
        ),
        (
            [FULL, kv.SharedWith(1)],
            r"layers\[1\] is SharedWith\(1\), expected one of the layers .*, \[0\]: name",
        ),
        (
            [FULL, kv.SharedWith(0), FULL, kv.SharedWith(1)],
            r"layers\[3\] is SharedWith\(1\), .*, \[0, 2\]: name",
        ),
        ([FULL, kv.SharedWith(7)], r"layers\[1\] is SharedWith\(7\), expected one of"),
    ],
)
def test_another_layer_than_an_own_one_before_it_is_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        config(layers)


def test_what_is_no_layer_is_refused():
    with pytest.raises(ValueError, match="layer is -1, expected at least 0"):
        kv.SharedWith(-1)
    with pytest.raises(
        TypeError, match="kind is SharedWith.*, expected a layer kind that stores keys and values"
    ):
        kv.Quantised(kv.SharedWith(0), "int8")


def test_new_keys_and_values_are_refused_and_those_of_own_layers_are_read():
    cache, _ = kv.allocate(kv.init(config()), [0, 1], [5, 2])
    cache, step = kv.extend(cache, [5, 2], max_new=5)
    x = jnp.ones((2, 5, 2, 4))
    message = (
        r"got k and v for layer 3, which reads those of layer 2 and stores none, expected none: call attend"
    )
    for refused in (kv.write, lambda cache, layer, k, v, step: kv.attention(cache, layer, k, k, v, step)):
        with pytest.raises(ValueError, match=message):
            refused(cache, 3, x, x, step)

    def write(cache):
        return kv.write(cache, jnp.int32(1), x, x, kv.extend(cache, [0, 0], max_new=5)[1])

    with pytest.raises(ValueError, match="layer is an array and the config has 1 shared layers"):
        jax.eval_shape(write, kv.init(config([FULL, kv.SharedWith(0)])))
    cache = testing.write_tokens(cache, jnp.arange(10).reshape(2, 5), step)
    assert testing.check_tokens(cache, {0: range(5), 1: range(5, 7)}) == []
    for shared, owner in ((1, 0), (3, 2), (4, 0)):
        for there, here in zip(kv.gather(cache, 1, shared), kv.gather(cache, 1, owner), strict=True):
            np.testing.assert_array_equal(there, here)


@pytest.mark.slow
def test_append_takes_those_of_own_layers():
    cache, _ = kv.allocate(kv.init(config()), [1], [3])
    new = jnp.broadcast_to(jnp.arange(1.0, 4)[:, None, None, None, None], (3, 2, 3, 2, 4))
    cache, _ = kv.append(cache, new, new, [0, 3])
    found = [float(kv.gather(cache, 1, layer)[0][2, 0, 0]) for layer in range(6)]
    assert found == [1, 1, 2, 2, 1, 3]
    with pytest.raises(ValueError, match="k has 6 layers, expected 3, those that store keys and values"):
        kv.append(cache, jnp.ones((6, 2, 1, 2, 4)), jnp.ones((6, 2, 1, 2, 4)), [0, 1])
