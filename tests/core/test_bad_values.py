"""What is no value for an argument is refused by the library's own sentence, whichever the function."""

import inspect
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.arrays.number_checks import finite_number
from kvcache_jax.tiers.stored_block import config_digest
from tests.core.public_calls import CACHED, CACHED_CALLS, NEW, PLAIN, PLAIN_CALLS, SIZES, TOKENS

STORE, WEIGHTS = kv.tiers.MemoryStore(), kv.tiers.digest("weights")
TICKET = kv.tiers.Ticket("127.0.0.1", 1, "epoch", 0, WEIGHTS, config_digest(CACHED))
LIBRARY = pathlib.Path(kv.__file__).parent

BAD = {
    "an object": object(),
    "a text": "é",
    "a dict": {"a": 1},
    "a set": {1},
    "a function": lambda *_: 0,
    "unequal rows": [1, [2]],
    "texts": np.array(["a", "b"]),
    "complex": np.ones(2, np.complex64),
    "numbers of rank three": np.full((2, 2, 2), 0.5),
    "a shape": jax.ShapeDtypeStruct((2,), jnp.int32),
    "a key": jax.random.key(0),
}

# name -> (function, arguments, those among its options that are tried too)
MAKERS = {
    "load": (kv.tiers.load, [STORE, kv.init(CACHED)], dict(weights=WEIGHTS, prompts=[[1]])),
    "take": (kv.tiers.take, [TICKET, kv.init(CACHED), [1]], dict(weights=WEIGHTS)),
    "PeerStore": (kv.tiers.PeerStore, [TICKET], {}),
    "Giver": (kv.tiers.Giver, [CACHED], dict(weights=WEIGHTS, host="192.0.2.1", port=0)),
    "ReplicaIndex.apply": (kv.processes.ReplicaIndex().apply, [[]], {}),
    "Placement": (kv.engine.Placement, [jax.make_mesh((2,), ("rows",))], dict(row_axis="rows")),
    "raise_for_status": (kv.raise_for_status, [[0]], {}),
    "prompt_hashes": (kv.processes.prompt_hashes, [TOKENS[0], 4], {}),
    "SamplingParams": (kv.decoding.SamplingParams, [], dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)),
    "GenerationRequest": (kv.GenerationRequest, [[1], 1], dict(stop_tokens=())),
    "CacheConfig": (
        kv.CacheConfig,
        [],
        SIZES | dict(layers=PLAIN.layers, eviction_policy="lru", dtype="float32"),
    ),
    "FullAttention": (kv.FullAttention, [1, 5], dict(num_blocks=None, dtype=None)),
}


def attend(*args, **options):
    """By a step of the cache."""
    cache, step = kv.extend(kv.init(PLAIN), [4, 4], max_new=4)
    return kv.attend(cache, 0, *args, step, **options)


CALLS = {
    **{name: (PLAIN, *call) for name, call in PLAIN_CALLS.items()},
    **{name: (CACHED, *call) for name, call in CACHED_CALLS.items()},
    **{name: (None, *call) for name, call in MAKERS.items()},
    "attend": (None, attend, [NEW], dict(scale=1.0, soft_cap=None, weights=None)),
}


def refused(call, args, options):
    """Whether a call refuses its arguments; what else it raises than its own sentence is a fault."""
    try:
        call(*args, **options)
    except OSError:  # an address that cannot be bound: all else was taken
        return False
    except Exception as error:
        raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert isinstance(error, ValueError | TypeError), repr(error)
        assert LIBRARY in raised_in.parents and "expected" in str(error), repr(error)
        return True
    return False


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_value_is_refused_in_a_sentence(name):
    config, call, args, options = CALLS[name]
    caches = [] if config is None else [kv.init(config)]
    inspect.signature(call).bind(*caches, *args, **options)
    assert caches or not refused(call, args, options)  # with caches `test_wide_numbers` calls them
    for bad in BAD.values():
        tried = [refused(call, [*caches, *args[:i], bad, *args[i + 1 :]], options) for i in range(len(args))]
        tried += [refused(call, [*caches, *args], options | {option: bad}) for option in options]
        assert all(tried) if bad is BAD["an object"] else any(tried)


def test_a_number_may_be_an_array_of_any_library():
    def found(value):
        try:
            return finite_number("x", value)
        except ValueError as refused:
            return str(refused)

    halves = [0.5, np.float32(0.5), np.array(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)]
    assert [found(value) for value in halves] == [0.5] * 5
    others = [jnp.array(True), jnp.zeros(1), np.array("a"), np.array(np.nan), jnp.complex64(1)]
    others += [*BAD.values(), jax.ShapeDtypeStruct((), jnp.float32)]
    assert all(f"{found(value)}".endswith(", expected a finite number") for value in others)
    jax.jit(lambda x: others.append(found(x)))(0.5)
    assert others[-1].endswith(", expected a finite number")
