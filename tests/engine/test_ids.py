"""Ids: every request has one of its own, given by the caller or by the engine."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import note


@pytest.mark.parametrize(
    "ids", [[None, 0], [None, None, 1, None], [2, None, None, 0], [None, False, 1.0], [None, np.int32(0)]]
)
def test_a_number_that_is_given_is_none_that_another_request_names(ids):
    """Neither one that comes later in the same push, nor one that runs."""
    engine, said = make_engine(), {}
    assert engine.push([ask([9], 2, 3)]) == 1
    requests = [ask([5, i], 3, request_id) for i, request_id in enumerate(ids)]
    assert engine.push(requests) == len(ids)
    note(said, engine)
    assert len(said) == 1 + len(ids)
    given = sorted(({name for name, _ in said} - {*ids, 3}), key=int)
    names = [given.pop(0) if name is None else name for name in ids]
    expect(said, [ask([5, i], 3, name) for i, name in enumerate(names)])


def test_an_id_that_is_named_twice_takes_nothing():
    engine = make_engine()
    for requests in ([ask([1], 2), ask([2], 2, 0), ask([3], 2, 0)], [ask([1], 2, "a"), ask([2], 2, "a")]):
        with pytest.raises(ValueError, match="which another request has that has not ended, expected one of"):
            engine.push(requests)
        assert engine.num_unfinished == 0


@pytest.mark.parametrize("name", [[1], {}, np.zeros(2), (1, [2])])
def test_an_id_that_cannot_be_hashed_is_refused_in_a_sentence(name):
    for call in (lambda: kv.GenerationRequest([1], 1, id=name), lambda: make_engine().cancel(name)):
        with pytest.raises(TypeError, match="id is .* expected one that can be hashed, such as a string"):
            call()


def test_an_id_that_does_not_equal_itself_is_refused():
    with pytest.raises(ValueError, match="id is nan, which does not equal itself and could not be found"):
        ask([1], 1, float("nan"))
