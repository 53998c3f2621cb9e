"""Results of the functions of users' extras, layer kinds and backends: wrong ones are refused by name."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import kvcache_jax as kv

SIZES = dict(num_blocks=8, block_size=4, max_seqs=3, max_seq_len=28)
FORGOTTEN = "returned a NoneType, expected a Control"
names = (f"test: own function {i}" for i in itertools.count())


def nothing(*args, **options):
    return None


def traced(config):
    """Traces a step, and operations that end, fork and publish rows; compiles nothing."""

    def step_fn():
        tokens = jnp.zeros((3, 5), jnp.int32) if config.enable_prefix_caching else None
        cache, _ = kv.allocate(kv.init(config), [0], [5], tokens=None if tokens is None else tokens[:1])
        cache, step = kv.extend(cache, [5, 0, 0], max_new=5, tokens=tokens)
        x = jnp.ones((3, 5, 1, 4))
        if isinstance(config.layers[0], kv.Recurrent):
            cache, _ = kv.recurrence(cache, 0, {"x": x[..., 0, 0]}, step)
        else:
            cache, _ = kv.attention(cache, 0, x, x, x, step)
        cache, _ = kv.fork(cache, [0], [1])
        cache, _ = kv.truncate(cache, [1], [2])
        if config.enable_prefix_caching:
            cache, _ = kv.commit(cache, [0])
        return kv.free(cache, [0])[0]

    jax.eval_shape(step_fn)


def config_of(**own):
    """Makes the config of a cache with an extra of such methods, and an array of its own."""
    own = {"name": "own", "empty": lambda self, config, numpy: numpy.ones(3, numpy.float32)} | own
    extras = [type("Own", (kv.state.Extra,), own)()]
    return kv.CacheConfig([kv.FullAttention(1, 4)], **SIZES, enable_prefix_caching=True, extras=extras)


def extra_with(**own):
    return lambda: traced(config_of(**own))


def kind_with(base=kv.LayerKind, **own):
    return lambda: traced(kv.CacheConfig([type("Own", (base,), own)(1, 4)], **SIZES))


def backend_with(supports=nothing, **parts):
    name = next(names)
    kv.backends.register_backend(kv.backends.Backend(name, supports, **parts))
    return lambda: traced(kv.CacheConfig([kv.FullAttention(1, 4)], **SIZES, implementation=name))


def recurrent_with(**own):
    entry = {"h": kv.BlockArray((4,), jnp.float32, head_axis=None, token_axis=0)}
    return kind_with(kv.Recurrent, reach=1, entry=lambda self, block_size, dtype: entry, **own)


def with_extras(control, value):
    return dataclasses.replace(control, extras=value)


@dataclasses.dataclass(frozen=True)
class Listed(kv.state.Extra):
    name = "listed"
    values: list = dataclasses.field(default_factory=list)


class Undecorated(kv.tiers.Host):
    """One that has a number beside the fields by which it is compared."""

    def __init__(self, number):
        super().__init__(8)
        object.__setattr__(self, "number", number)


class Wide(kv.FullAttention):
    """A kind that is no dataclass of its own."""

    def __init__(self, width):
        super().__init__(1, 4)
        object.__setattr__(self, "width", width)


def test_own_functions_that_return_what_they_should_are_served():
    extra_with()(), kind_with()(), backend_with()()
    recurrent_with(advance=lambda self, point, held, count, new, weights: (new["x"], {"h": new["x"]}))()


CASES = {
    "no name": (extra_with(name=None), "without a name, expected a str"),
    "no value": (
        lambda: kv.CacheConfig([kv.FullAttention(1, 4)], extras=[Listed()]),
        "unhashable type: 'list'",
    ),
    "a number beside the fields": (
        lambda: kv.CacheConfig([kv.FullAttention(1, 4)], **SIZES, extras=[Undecorated(1)]),
        "extras[0] is a Undecorated with 'number' beside its fields, expected a frozen dataclass",
    ),
    "a kind with a number beside the fields": (
        lambda: kv.CacheConfig([Wide(1), Wide(2)], **SIZES),
        "layers[0] is a Wide with 'width' beside its fields, expected a frozen dataclass",
    ),
    "empty": (
        extra_with(empty=lambda *_: [0.0]),
        "empty of the extra 'own' returned a float, expected arrays",
    ),
    "inherit": (extra_with(inherit=nothing), "inherit of the extra 'own' " + FORGOTTEN),
    "forget": (extra_with(forget=nothing), "forget of the extra 'own' " + FORGOTTEN),
    "truncate": (extra_with(truncate=nothing), "truncate of the extra 'own' " + FORGOTTEN),
    "published": (extra_with(note_published=nothing), "note_published of the extra 'own' " + FORGOTTEN),
    "another dtype": (
        extra_with(forget=lambda self, control, rows: with_extras(control, {"own": jnp.zeros(3, jnp.int32)})),
        "returned int32[3] as Control.extras['own'], expected float32[3]",
    ),
    "no array": (
        extra_with(forget=lambda self, control, rows: with_extras(control, {})),
        "returned nothing as Control.extras['own'], expected float32[3]",
    ),
    "prefix": (
        extra_with(prefix_len=lambda self, control, seq_ids, length: length.astype(jnp.float32)),
        "prefix_len of the extra 'own' returned float32[1], expected int32[1]",
    ),
    "held": (
        lambda: kv.check_invariants(kv.init(config_of(held_blocks=lambda *_: [1]))),
        "held_blocks of the extra 'own' returned a list, expected a HeldBlocks",
    ),
    "violations": (
        lambda: kv.check_invariants(kv.init(config_of(violations=nothing))),
        "violations of the extra 'own' returned a NoneType, expected a list",
    ),
    "span": (kind_with(span=None), "layers[0].span is None, expected a property"),
    "inputs": (kind_with(inputs={"x": (1,)}), "layers[0].inputs is {'x': (1,)}, expected a property"),
    "window": (lambda: kv.Span(window=0), "window is 0, expected at least 1"),
    "arrays": (kind_with(arrays=lambda *_: [1]), "Own.arrays() returned [1], expected at least one"),
    "encode": (kind_with(encode=nothing), "Own.encode() returned a NoneType, expected its arrays ['k', 'v']"),
    "no tuple": (kind_with(keys_values=nothing), "Own.keys_values() returned a NoneType, expected a tuple"),
    "fewer tokens": (
        kind_with(keys_values=lambda self, tile, weights: (tile["k"][:, :1], tile["v"])),
        "Own.keys_values() returned ['float32[1, 1, 4]', 'float32[1, 4, 4]']",
    ),
    "integers": (
        kind_with(keys_values=lambda self, tile, weights: (jnp.int8(tile["k"]), jnp.int8(tile["v"]))),
        "Own.keys_values() returned ['int8[1, 4, 4]', 'int8[1, 4, 4]'], expected a tuple",
    ),
    "scales": (
        kind_with(keys_values=lambda self, tile, weights: (tile["k"], tile["v"], tile["k"])),
        "scales, offsets [heads, 4] or None",
    ),
    "queries": (kind_with(queries=lambda self, q: q[..., :2]), "Own.queries() returned float32[3, 5, 1, 2]"),
    "outputs": (kind_with(outputs=lambda self, out: out.sum(-1)), "Own.outputs() returned float32[3, 5, 1]"),
    "length": (kind_with(row_len=nothing), "Own.row_len() returned nothing, expected int32[3]"),
    "no state": (
        recurrent_with(advance=nothing),
        "Own.advance() returned a NoneType, expected outputs [4, ...]",
    ),
    "one entry": (
        recurrent_with(advance=lambda *inputs: (inputs[4]["x"], {"h": inputs[4]["x"][:1]})),
        "have float32[1] as 'h', expected [4]",
    ),
    "no advance": (recurrent_with(), "Own has no `advance`, expected a kind's own"),
    "supports": (backend_with(lambda *_: False), "returned False, expected None or a str"),
    "attention": (
        backend_with(decode=lambda q, *_, **options: (q[..., :1], q[..., 0])),
        "returned float32[3, 5, 1, 1, 1] as tuple[0], expected float32[3, 5, 1, 1, 4]",
    ),
    "write": (
        backend_with(write=lambda pool, *_, **options: jax.tree.map(lambda x: x[:1], pool)),
        "returned float32[1, 1, 4, 4] as KVPool.arrays['k'], expected float32[8, 1, 4, 4]",
    ),
    "copies": (backend_with(copy_blocks=nothing), "returned a NoneType, expected a KVPool"),
    "plan": (
        backend_with(decode=nothing, plan=nothing),
        "plan of the backend 'test: own function",
    ),
}


@pytest.mark.parametrize("call, error", CASES.values(), ids=CASES)
def test_what_own_functions_return_is_refused_by_their_names(call, error):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(error)):
        call()
