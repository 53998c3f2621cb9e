"""Numbers at the ends of int32, and beyond: bounded, or refused in a sentence; no other request notices."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import program, table
from kvcache_jax.engine.state import Phase
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import collect, config, forward, make_params, note

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def test_answers_of_any_length_are_refused_and_overwrite_nothing():
    """The longest that there is room for, one more, and all around the ends of int32 and int64."""
    lengths = [48, 49, 2**31 - 48, *(2**31 + d for d in range(-9, 3)), 2**32, 2**32 + 3, 2**63, 10**30]
    longest = ask([2] * 40, 5, "fits")
    others = [longest, *(ask([i, 7], 12, f"other {i}") for i in range(8))]
    refused = [
        ask([4] * (1 + i % 3), length, length, num_samples=1 + i % 2) for i, length in enumerate(lengths)
    ]
    mixed = [x for pair in itertools.zip_longest(others, refused) for x in pair if x is not None]
    said = collect(make_engine(), mixed)
    expect(said, others)
    samples = [(request.id, i) for request in refused for i in range(request.num_samples)]
    assert all(said[sample] == ([], [], "refused") for sample in samples)


def test_values_at_the_ends_are_taken_as_they_are():
    ends = [
        dict(priority=LOWEST, sampling=kv.decoding.SamplingParams(temperature=0.7, top_k=HIGHEST, seed=0)),
        dict(priority=HIGHEST, sampling=kv.decoding.SamplingParams(temperature=0.7, min_p=1.0, seed=2**32)),
        dict(priority=0, sampling=kv.decoding.SamplingParams(temperature=8e37, top_p=1e-30, seed=10**30)),
        dict(priority=-1, stop_tokens=[HIGHEST, 0, 3], deadline=3e38),
        dict(priority=LOWEST, namespace=np.full(4, 2**32 - 1, np.uint32), client=7),
    ]
    requests = [ask([i, 5], 9, 2**31 - 2 + i, **options) for i, options in enumerate(ends)]
    requests += [ask([i, 5], 9, -(2**31) - i) for i in range(3)]
    expect(collect(make_engine(), requests), requests)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ask([1], 1, priority=2**31), "priority is 2147483648, expected -2147483648 to 2147483647"),
        (lambda: ask([1], 1, priority=LOWEST - 1), "priority is -2147483649, expected -2147483648 to"),
        (lambda: ask([1], 1, stop_tokens=[2**31]), "stop_tokens has the token id 2147483648, expected"),
        (lambda: ask([2**31], 1), "prompt has the token id 2147483648, expected"),
        (
            lambda: ask([1], 1, sampling=kv.decoding.SamplingParams(top_k=2**31)),
            r"top_k is 2147483648, expected 0 <= top_k <= 2\*\*31 - 1",
        ),
        (
            lambda: ask([1], 1, sampling=kv.decoding.SamplingParams(seed=-1)),
            "seed is -1, expected at least 0",
        ),
        (lambda: ask([1], 1, deadline=1e39), "deadline is 1e\\+39, expected a finite number"),
        (lambda: ask([1], -1), "max_new_tokens is -1, expected at least 1"),
        (lambda: make_engine().push([ask([1], 1, client=2**31)]), "has 2147483648 as its client, expected"),
        (lambda: make_engine().push([ask([1], 1, num_samples=2**40)]), "samples, expected at most 7"),
        *(
            (lambda make=make, name=name, value=value: make(**{name: value}), f"{name} is {value}, expected")
            for make, names in (
                (kv.engine.Limits, "max_requests max_tokens max_stop_tokens num_clients max_items"),
                (kv.engine.Schedule, "ageing_steps max_bypasses long_prefill_len"),
                (make_engine, "num_drafts num_top_logprobs steps_per_dispatch token_budget"),
            )
            for name in names.split()
            for value in (-1, 2**30 + 1, 2**31, 2**63)
        ),
        *(
            (lambda make=make, name=name: make(**{name: 0}), f"{name} is 0, expected")
            for make, names in (
                (kv.engine.Limits, "max_requests max_tokens num_clients"),
                (kv.engine.Schedule, "long_prefill_len max_bypasses"),
            )
            for name in names.split()
        ),
    ],
)
def test_what_is_beyond_is_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_service_of_one_who_asks_alone_has_an_end():
    engine = make_engine()
    service = jnp.array([HIGHEST, 5, 2**30], jnp.int32)
    for phase, expected in ((Phase.EMPTY, [2**29, 5, 2**29]), (Phase.WAITING, [2**29, 0, 2**29])):
        client = jnp.array([1], jnp.int32)
        requests = dataclasses.replace(engine.state.requests, client=client)
        state = dataclasses.replace(
            engine.state, service=service, phase=jnp.full(1, phase, jnp.int32), requests=requests
        )
        assert program._lifted(state).tolist() == expected


def test_numbers_of_samples_come_to_an_end(monkeypatch):
    """The last ones are served; then none of a push is taken, and those that run go on."""
    monkeypatch.setattr(table, "_MOST_SAMPLES", 6)
    engine, said = make_engine(), {}
    requests = [ask([i, 3], 5, i, num_samples=2) for i in range(2)]
    assert engine.push(requests) == 2
    with pytest.raises(
        ValueError, match="got 2 requests and this engine can number 2 more samples, expected"
    ):
        engine.push([ask([7], 2, "a", num_samples=2), ask([8], 2, "b")])
    last = ask([7], 2, "a", num_samples=2)
    assert engine.push([last]) == 1
    note(said, engine)
    expect(said, [*requests, last])


def test_a_table_of_many_requests_has_at_most_an_i32_of_tokens():
    large = kv.CacheConfig(config().layers, num_blocks=8, max_seqs=2, max_seq_len=2**29)
    with pytest.raises(
        ValueError, match=r"max_tokens is 536870912, expected 536870913 <= max_tokens <= 2\*\*30"
    ):
        kv.Engine(forward, make_params(), large, limits=kv.engine.Limits(max_tokens=2**29))
