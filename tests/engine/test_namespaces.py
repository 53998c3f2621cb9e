"""Namespaces of weights and of requests: no two pairs share a block, whatever the two are."""

import itertools

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.prefix.names import namespace_within
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import collect, make_params, note

A, B = kv.namespace(weights="a"), kv.namespace(tenant="b")
NAMES = [np.zeros(4, np.uint32), A, B, A ^ B, np.full(4, 2**32 - 1, np.uint32), A[::-1].copy()]


def test_no_two_pairs_share_a_namespace():
    """Swapped pairs, equal ones, those of equal XOR; within the default one a namespace is itself."""
    found = {
        (i, j): namespace_within(outer, inner).tobytes()
        for (i, outer), (j, inner) in itertools.product(enumerate(NAMES), repeat=2)
    }
    assert len(set(found.values())) == len(found)
    assert all(found[0, j] == inner.tobytes() for j, inner in enumerate(NAMES))
    words = namespace_within(A, B)
    assert words.dtype == np.uint32 and words.shape == (4,) and (words == namespace_within(A, B)).all()


def test_prompts_find_only_what_the_same_weights_computed_for_the_same_namespace():
    """Each version of the weights, each request's namespace, those that are equal too; asked twice."""
    engine, prompt = make_engine(namespace=A), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for version, words in enumerate((A, B, A ^ B, None)):
        if version:
            engine.set_params(make_params(shift=version), words)
        hits = []
        for i, name in enumerate([None, A, B, A ^ B] * 2):
            before = engine.figures().counts[kv.engine.Counter.CACHED_TOKENS]
            request = ask(prompt, 2, i, namespace=name)
            expect(collect(engine, [request]), [request], shift=version)
            hits.append(engine.figures().counts[kv.engine.Counter.CACHED_TOKENS] - before)
            found = kv.lookup(engine.state.cache, [prompt], [9], engine.namespace_of(name)).tolist()
            assert found == [8]
        # Eleven blocks: those of other versions made room.
        assert hits == [0] * 4 + [8] * 4


@pytest.mark.parametrize("num_drains", [1, 5])
def test_who_waits_is_computed_under_new_weights(num_drains):
    """Blocks of the old weights are in the cache, in the namespace that the request had when it came."""
    engine = make_engine(namespace=A)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    said = collect(engine, [ask(prompt, 2, "before", namespace=B)])
    rows = [ask([i] * 3, 9, f"row {i}") for i in range(4)]
    late = [ask(prompt, 6, f"late {i}", namespace=B) for i in range(2)]
    assert engine.push([*rows, *late]) == 6
    for _ in range(num_drains):
        engine.drain(max_steps=1)
    engine.set_params(make_params(shift=1), B)
    note(said, engine.take_events())
    note(said, engine)
    expect(said, late, shift=1)
    assert kv.lookup(engine.state.cache, [prompt], [9], engine.namespace_of(B)).tolist() == [8]


def test_a_namespace_is_checked():
    with pytest.raises(ValueError, match=r"namespace is int\d+\(2,\), expected uint32 \(4,\)"):
        make_engine().namespace_of(np.zeros(2, int))
