"""What is compiled into the program by choice: the hook, the most probable tokens, drafts, policies."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.policies import keys_of, policies
from tests.engine.exact_engine import (
    BANS_ALL,
    LIMITS,
    ask,
    expect,
    make_engine,
    make_engine_with_inputs,
)
from tests.engine.exact_model import (
    NAN_TOKEN,
    VOCAB,
    ban_zero,
    collect,
    decode_alone,
    forward,
    make_params,
    random_request,
)

HOOKED: dict[str, Any] = dict(
    process_logits=ban_zero,
    num_top_logprobs=3,
    policy="longest prefix",
    schedule=kv.engine.Schedule(max_bypasses=2),
    limits=dataclasses.replace(LIMITS, max_items=2),
)


@pytest.mark.slow
def test_a_hook_and_the_most_probable_tokens():
    """Token 0 is banned; the hook's logits are those that log-probabilities are of."""
    engine = make_engine(**HOOKED)
    rng = np.random.default_rng(3)
    requests = [random_request(rng, i) for i in range(9)]
    expect(collect(engine, requests), requests, bans_zero=True)
    assert any(0 in decode_alone(request)[0] for request in requests)

    assert (
        engine.push(
            [
                ask([1, 2, 3], 4, "greedy"),
                ask([4], 4, "random", sampling=kv.decoding.SamplingParams(temperature=1.5)),
            ]
        )
        == 2
    )
    for event in engine:
        assert len(event.top_logprobs) == len(event.tokens)
        for token, logprob, tops in zip(event.tokens, event.logprobs, event.top_logprobs, strict=True):
            assert (
                len(tops) == 3 and 0 not in tops and sorted(tops.values(), reverse=True) == [*tops.values()]
            )
            assert tops.get(token, logprob) == pytest.approx(logprob, abs=1e-6)
            if event.id == "greedy":
                assert logprob == pytest.approx(max(tops.values()), abs=1e-6)


@pytest.mark.slow
def test_the_longest_prefix_goes_first_but_not_for_ever():
    """One row is left; the cache has what the later requests begin with. Two of them pass the first."""
    engine = make_engine(**HOOKED)
    collect(engine, [ask([5] * 9, 1, "begin")])
    long = [ask([9 + i] * 2, 20, f"row {i}") for i in range(3)]
    assert engine.push(long) == 3
    engine.drain(max_steps=1)
    assert engine.push([ask([8] * 9, 1, "no hit"), *(ask([5] * 9, 1, f"hit {i}") for i in range(3))]) == 4
    ended = [event.id for event in engine if event.finish_reason and "row" not in str(event.id)]
    assert ended == ["hit 0", "hit 1", "no hit", "hit 2"]


@pytest.mark.slow
def test_hits_never_end_inside_an_item():
    """Blocks of 4 tokens: an item at 2 to 9 is reused whole or not at all, also by who was preempted."""
    engine = make_engine(**HOOKED)
    image, other = kv.item_tokens(b"an image", 7), kv.item_tokens(b"another", 7)

    def with_image(item, end, request_id, max_new=3):
        items = [(2, 9)] if len(end) else []
        return ask([1, 2, *item, *end], max_new, request_id, items=items)

    def num_cached(request):
        before = engine.figures().counts[kv.engine.Counter.CACHED_TOKENS]
        expect(collect(engine, [request]), [request], bans_zero=True)
        return engine.figures().counts[kv.engine.Counter.CACHED_TOKENS] - before

    assert num_cached(with_image(image, [3, 4, 5, 6, 7], "first")) == 0
    assert num_cached(with_image(image, [3, 4, 5, 9], "the same, and 3 tokens behind it")) == 12
    assert num_cached(with_image(image, [8, 8, 8, 8], "two blocks are equal, and end inside it")) == 0
    assert num_cached(with_image(other, [3, 4, 5, 6], "another image")) == 0
    assert num_cached(ask([1, 2, *image, 8], 2, "no item, but its words", items=[])) == 8
    crowd = [with_image(image, [i] * 5, i, 20) for i in range(5)]
    expect(collect(engine, crowd), crowd, bans_zero=True)
    assert engine.figures().counts[kv.engine.Counter.PREEMPTIONS] > 0


@pytest.mark.slow
def test_drafts_change_nothing_but_the_number_of_steps():
    engine = make_engine(num_drafts=3, policy="fair", token_budget=4 * 4 + 8)
    rng = np.random.default_rng(4)
    requests = [random_request(rng, i) for i in range(12)]
    expect(collect(engine, requests), requests)
    counts = engine.figures().counts
    assert counts[kv.engine.Counter.DRAFTED] > 0

    engine.set_params(make_params(counts=True))
    requests = [ask([1, 2, 3, 4, 5, 6, 0, 1, 2], 20, i, stop_tokens=[9]) for i in range(3)]
    expect(collect(engine, requests), requests, counts=True)
    after = engine.figures().counts
    num_steps = after[kv.engine.Counter.STEPS] - counts[kv.engine.Counter.STEPS]
    assert after[kv.engine.Counter.ACCEPTED] - counts[kv.engine.Counter.ACCEPTED] > 20
    assert num_steps < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(num_drafts=1, process_logits=ban_zero, token_budget=20),
            "got num_drafts = 1 and process_log",
        ),
        (dict(num_drafts=3), "token_budget is 12, expected more than 16, the next tokens of 4 rows of 4"),
        (dict(num_drafts=48, token_budget=999), "num_drafts is 48, expected below max_query_len = 48"),
        (dict(process_logits=3), "process_logits is 3, expected a function, or None"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_engine(**options)


def test_a_window_must_take_back_drafts():
    layers = [kv.FullAttention(1, 8), kv.SlidingWindow(1, 8, window=4)]
    small = kv.CacheConfig(layers, num_blocks=8, max_seqs=2, max_seq_len=32)
    with pytest.raises(ValueError, match=r"layers\[1\] is .*max_rollback = 0, expected max_rollback=2"):
        kv.Engine(forward, make_params(), small, num_drafts=2)


def test_kernels_are_not_batch_invariant():
    layers = [kv.FullAttention(1, 64, dtype=jnp.bfloat16)]
    small = kv.CacheConfig(layers, num_blocks=8, max_seqs=2, max_seq_len=32, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="batch_invariant is True and implementation 'mosaic_gpu', expected"):
        kv.Engine(forward, make_params(), small, batch_invariant=True)


@pytest.mark.parametrize(
    ("process", "found"),
    [
        (lambda logits, state: logits[:1], r"float32\[1, 24\]"),
        (lambda logits, state: logits[:, None], r"float32\[4, 1, 24\]"),
        (lambda logits, state: logits > 0, r"bool\[4, 24\]"),
        (lambda logits, state: jnp.argsort(logits), r"int32\[4, 24\]"),
        (lambda logits, state: logits.astype(jnp.complex64), r"complex64\[4, 24\]"),
        (lambda logits, state: None, "None"),
        (lambda logits, state: (logits, state), r"\(.*"),
    ],
)
def test_a_hook_that_returns_something_else_is_named(process, found):
    """Masks too, which are no logits; nothing is compiled, and the request stays."""
    engine = make_engine(process_logits=process)
    engine.push([ask([1], 1)])
    with pytest.raises(
        TypeError, match=f"process_logits returned {found}, expected floating logits of the sh"
    ):
        engine.drain()
    assert engine.num_unfinished == 1


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda tokens: None, "None, expected {name: array} of what changed"),
        (lambda tokens: {"a": 1}, "'a' of 1, expected inputs that it was given: .*int32"),
        (lambda tokens: {"a": tokens[:1]}, r"'a' of int32\[1\], expected inputs"),
        (lambda tokens: {"a": tokens.astype(jnp.float32)}, r"'a' of float32\[\d+\], expected inputs"),
        (lambda tokens: {"b": tokens}, r"'b' of int32\[\d+\], expected inputs"),
    ],
)
def test_inputs_that_come_back_as_something_else_are_named(changed, found):
    engine = make_engine(inputs=kv.engine.Inputs({"a": int}, lambda inputs, tokens: changed(tokens)))
    engine.push([ask([1], 1)])
    with pytest.raises(TypeError, match=f"advance_inputs returned {found}"):
        engine.drain()


def test_no_more_tokens_are_reported_than_there_are():
    engine = make_engine(num_top_logprobs=VOCAB + 1)
    engine.push([ask([1], 1)])
    with pytest.raises(ValueError, match=r"num_top_logprobs is 25 and .* for 24 tokens, expected at most 24"):
        engine.drain()


def test_a_request_whose_tokens_are_all_banned_says_so():
    """At its first token, in its midst; one whose logits hold NaN ends for that, and the others go on."""
    inputs = [{"bans": True, "automaton": BANS_ALL}, {"bans": True, "automaton": BANS_ALL + 3}, {}]
    requests = [ask([1, 2, 3], 9, i, inputs=inputs[i]) for i in range(3)]
    requests.append(ask([1] * 7 + [NAN_TOKEN], 9, "NaN"))
    said = collect(make_engine_with_inputs(), requests)
    expect(said, requests[2:])
    assert said["NaN", 0] == ([], [], "nan_logits")
    assert said[0, 0] == ([], [], "no_token")
    assert said[1, 0][0::2] == (decode_alone(requests[1])[0][:3], "no_token")


def test_who_came_first_goes_first_when_the_count_of_steps_begins_again():
    """Steps are counted modulo 2**32: of two waiting requests the one that came before it goes first."""
    engine = make_engine_with_inputs()
    for start in (2**31 - 2, 2**32 - 2):
        order = []
        counters = engine.state.counters.at[kv.engine.Counter.STEPS].set(np.uint32(start))
        engine._device._state = dataclasses.replace(engine.state, counters=counters)
        assert engine.push([ask([i], 7, f"row {i}") for i in range(4)] + [ask([9], 2, "before")]) == 5
        for _ in range(3):
            engine.drain(max_steps=1)
        assert engine.push([ask([9], 2, "after"), ask([8], 2, "urgent", priority=2**31 - 1)]) == 2
        for event in [*engine.take_events(), *engine]:
            order += [event.id] if event.finish_reason else []
        assert order[4:] == ["urgent", "before", "after"]


def _metadata(**columns):
    num = len(next(iter(columns.values())))
    zeros = jnp.zeros(num, jnp.int32)
    arrays = {name: zeros for name in kv.engine.RequestMetadata._fields[:8]} | {"uid": jnp.arange(num)}
    arrays |= {name: jnp.array(values, jnp.int32) for name, values in columns.items()}
    return kv.engine.RequestMetadata(**arrays, ageing_steps=8, max_bypasses=2)


def _order(policy, **columns):
    keys = keys_of(policy, _metadata(**columns))
    return np.lexsort([np.asarray(key) for key in keys[::-1]]).tolist()


def test_policies_order_requests():
    assert _order("fcfs", priority=[0, 9, 3]) == [0, 1, 2]
    assert _order("priority", priority=[0, 9, 3]) == [1, 2, 0]
    assert _order("priority", priority=[0, 1, 1], arrival_step=[0, 7, 9]) == [1, 0, 2]
    assert _order("priority", priority=[1, 1, 1], num_preemptions=[0, 1, 9]) == [2, 1, 0]
    assert _order("priority", priority=[1, 2], num_preemptions=[99, 0]) == [1, 0]
    assert _order("longest prefix", num_cached=[0, 8, 4], num_bypassed=[2, 0, 0]) == [0, 1, 2]
    assert _order("longest prefix", num_cached=[0, 8, 4], num_bypassed=[1, 0, 0]) == [1, 2, 0]
    assert _order("fair", service=[5, 0, 5]) == [1, 0, 2]


def test_policies_of_ones_own(monkeypatch):
    monkeypatch.setattr(policies, "_entries", dict(policies._entries))
    with pytest.raises(ValueError, match="there is a request policy 'fcfs' already"):
        kv.engine.request_policy("fcfs")
    with pytest.raises(TypeError, match="name is 3, expected a str"):
        kv.engine.request_policy(3)  # type: ignore
    with pytest.raises(TypeError, match="is None, expected a function of RequestMetadata"):
        kv.engine.request_policy("none")(None)  # type: ignore
    kv.engine.request_policy("a number", row_key=lambda requests: requests.uid / 2)(lambda requests: (3,))  # type: ignore
    with pytest.raises(TypeError, match=r"request policy 'a number' returned a int, expected int32\[2\]"):
        keys_of("a number", _metadata(uid=[0, 1]))
    with pytest.raises(TypeError, match=r"'a number' returned float32\[2\], expected int32\[2\]"):
        keys_of("a number", _metadata(uid=[0, 1]), of_rows=True)
