"""What a request says to the program: inputs by row, states that advance, log-probabilities, stop strings."""

import functools

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.decoding.sampling import sampling_columns
from kvcache_jax.engine.inputs import check_inputs
from tests.engine.exact_engine import SIZES, TABLE, RandomPace, advance, ask, expect, make_engine_with_inputs
from tests.engine.exact_model import (
    VOCAB,
    _next_token,
    collect,
    columns_of,
    config,
    decode_alone,
    draw,
    forward,
    make_params,
    random_request,
)

GREEDY = sampling_columns(1)


make_engine = functools.cache(make_engine_with_inputs)


def text_of(tokens):
    """Letters, of which each third token is half of one, as bytes are of characters."""
    text, i = "", 0
    while i < len(tokens):
        if tokens[i] % 3 == 2:
            text += "\ufffd" if i + 1 == len(tokens) else chr(200 + tokens[i])
            i += 2
        else:
            text += chr(ord("a") + tokens[i])
            i += 1
    return text


def alone(request, sample_id=0):
    """What a request says alone: by the oracle's logits, and the automaton and bias in numpy."""
    inputs = request.inputs
    state, bans = int(inputs.get("automaton", 0)), bool(inputs.get("bans", False))
    bias = inputs.get("bias", np.zeros(VOCAB, np.float32))
    tokens = np.zeros(64, np.int32)
    tokens[: len(request.prompt)] = request.prompt
    columns = columns_of(request.sampling, sample_id)
    said = []
    for length in range(len(request.prompt), request.num_tokens):
        model = make_params(shift=int(inputs.get("shift", 0)))
        logits = np.asarray(_next_token(tokens, np.int32(length), model, GREEDY, 1)[2])
        if bans:
            logits = np.where(np.arange(VOCAB) % 5 == state, -np.inf, logits)
        logits = logits + bias
        if np.isnan(logits).any():
            return said, "nan_logits"
        token = int(draw(np.float32(logits), columns, np.int32([length]))[0][0])
        tokens[length], state = token, TABLE[state, token]
        said.append(token)
        if token in request.stop_tokens:
            return said, "stop"
    return said, "length"


def with_inputs(rng, i):
    shift = int(rng.integers(3))
    inputs = {"shift": shift}
    if rng.random() < 0.7:
        inputs |= {"bans": True, "automaton": int(rng.integers(5))}
    if rng.random() < 0.5:
        inputs["bias"] = (rng.integers(-8, 9, VOCAB) / 8).astype(np.float32)
    # Keys and values depend on the shift, as an adapter's do: so does the namespace.
    return random_request(rng, i, inputs=inputs, namespace=kv.namespace(adapter=str(shift)))


@pytest.mark.slow
def test_random_mixes_with_inputs_resets_releases_and_early_ends():
    """Every row has its own inputs in every part of a step; automata go on whatever comes between."""
    engine = make_engine()
    rng = np.random.default_rng()

    def disturb():
        kind = rng.random()
        if kind < 0.05:
            engine.reset()
        elif kind < 0.15:
            engine.release(keep=kind < 0.1)
            engine.restore()

    for seed in range(8):
        rng = np.random.default_rng(seed)
        engine._pace = RandomPace(8, rng)
        requests = [with_inputs(rng, i) for i in range(9)]
        said = collect(engine, requests, disturb)
        for request in requests:
            for i in range(request.num_samples):
                assert said[request.id, i][::2] == alone(request, i), (seed, request)
    counts = engine.figures().counts
    assert counts[kv.engine.Counter.PREEMPTIONS] > 0 and counts[kv.engine.Counter.CACHED_TOKENS] > 0


@pytest.mark.slow
def test_a_batch_invariant_step_hands_inputs_over_too():
    engine, rng = make_engine(batch_invariant=True), np.random.default_rng(77)
    requests = [with_inputs(rng, i) for i in range(8)]
    said = collect(engine, requests)
    for request in requests:
        for i in range(request.num_samples):
            assert said[request.id, i][::2] == alone(request, i), request
    check_prompt_logprobs(engine)


def check_prompt_logprobs(engine):
    """Each token of a prompt under the tokens before it, cached before or not; once, of the first sample."""
    prompts = [[7, 1, 4, 2, 8, 5, 3, 1, 9, 2, 6], [7, 1, 4, 2, 8, 5, 3, 1, 9, 3], [4, 4], [5]]
    requests = [
        ask(p, 5, ("p", i), prompt_logprobs=True, num_samples=1 + i % 2) for i, p in enumerate(prompts)
    ]
    requests.append(ask(prompts[0], 5, "silent"))
    found = {}
    for begin in (0, 3):  # the second time all is in the cache
        batch = requests[begin : begin + 3] if begin == 0 else [requests[0], *requests[3:]]
        assert engine.push(batch) == len(batch)
        for event in engine:
            if event.prompt_logprobs is not None:
                assert (event.id, event.sample_id) not in found and event.sample_id == 0 and event.tokens
                found[event.id, event.sample_id] = event.prompt_logprobs
        for request in batch:
            if request.prompt_logprobs:
                logprobs = found.pop((request.id, 0), None)
                assert logprobs is not None, request
                expected = []
                for n in range(1, len(request.prompt)):
                    logits = _next_token(
                        np.pad(request.prompt, (0, 64 - len(request.prompt))),
                        np.int32(n),
                        make_params(),
                        GREEDY,
                        1,
                    )[2]
                    expected.append(jax.nn.log_softmax(logits[0])[request.prompt[n]])
                np.testing.assert_allclose(logprobs, expected, rtol=1e-5)
        assert found == {}


@pytest.mark.slow
def test_log_probabilities_of_prompts_and_of_as_many_tokens_as_asked():
    engine = make_engine()
    check_prompt_logprobs(engine)
    assert engine.push([ask([3, 1], 4, k, num_top_logprobs=k) for k in (0, 2, 3)] + [ask([3, 1], 4)]) == 4
    for event in engine:
        most = 3 if event.id not in (0, 2) else event.id
        assert [len(tops) for tops in event.top_logprobs] == [most] * len(event.tokens) * (most > 0)


@pytest.mark.slow
def test_stop_strings_end_a_request_before_them():
    """Over any number of tokens, at any length of dispatches: no token of one is told, nor what follows."""
    engine, num_stopped = make_engine(), 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        engine._pace = RandomPace(8, rng)
        requests, expected = [], {}
        for i in range(7):
            prompt, max_new = (
                rng.integers(0, VOCAB - 1, int(rng.integers(1, 9))).tolist(),
                int(rng.integers(9, 25)),
            )
            tokens, _, reason = decode_alone(ask(prompt, max_new, i))
            text = text_of(tokens)
            place = int(rng.integers(0, max(len(text) - 3, 1)))
            stops = [text[place : place + int(rng.integers(1, 4))] or "a", "never said"]
            requests.append(ask(prompt, max_new, i, stop_strings=kv.engine.StopStrings(stops, text_of)))
            ends = [text.find(stop) for stop in stops if stop in text]
            if ends:
                num_stopped += 1
                text, reason = text[: min(ends)], "stop"
                whole = [n for n in range(len(tokens) + 1) if len(text_of(tokens[:n])) <= len(text)]
                tokens = tokens[: max(n for n in whole if not text_of(tokens[:n]).endswith("\ufffd"))]
            expected[i] = (tokens, text, reason)
        assert engine.push(requests) == 7
        found = {}
        while engine.num_unfinished:
            engine.drain()
            if rng.random() < 0.1:
                engine.reset()
            for event in engine.take_events():
                tokens, text, reason = found.get(event.id, ([], "", None))
                assert reason is None and len(event.tokens) == len(event.logprobs)
                found[event.id] = (tokens + event.tokens, text + (event.text or ""), event.finish_reason)
        assert found == expected, seed
    assert num_stopped > 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: push(inputs={"shift": 1.5}),
            r"the input 'shift' of float64\[\], expected values of int32\[\]",
        ),
        (lambda: push(inputs={"shift": 2**31}), r"the input 'shift' of int64\[\], expected values of int32"),
        (
            lambda: push(inputs={"bias": [1.0]}),
            r"the input 'bias' of float64\[1\], expected values of float32\[24",
        ),
        (
            lambda: push(inputs={"lora": 1}),
            r"has the input 'lora', expected one of \['automaton', 'bans', 'bias'",
        ),
        (lambda: push(num_top_logprobs=4), "num_top_logprobs = 4, expected at most 3: make the Engine with"),
        (lambda: ask([1], 1, inputs=None), "inputs is None, expected {name: value}"),
        (lambda: ask([1], 1, inputs={"a": [[1], [1, 2]]}), r"inputs\['a'\] is \[\[1\], .* of one shape"),
        (lambda: ask([1], 1, items=None), r"items is None, expected a list of pairs \(first"),
        (lambda: ask([1], 1, items=[(0, 1, 2)]), r"items has \(0, 1, 2\), expected a pair \(first"),
        (lambda: kv.engine.Inputs(["a"]), r"inputs is \['a'\], expected {name: dtype}"),  # type: ignore
        (lambda: kv.engine.Inputs({3: bool}), "inputs has the name 3, expected a str"),  # type: ignore
        (lambda: kv.engine.Inputs({"a": object}), r"inputs\['a'\] is <class 'object'>, expected a dtype"),
        (lambda: kv.engine.Inputs({"a": None}), r"inputs\['a'\] is None, expected a dtype"),
        (
            lambda: kv.Engine(forward, make_params(), config(), inputs=np.zeros(2)),  # type: ignore
            r"inputs is array\(\[0., 0.\]\), expected {name: dtype}, or kv.engine.Inputs",
        ),
        (lambda: kv.engine.StopStrings(None, text_of), "texts is None, expected a list of"),  # type: ignore
        (lambda: kv.engine.StopStrings("ab", text_of), "texts is 'ab', expected a list of strings"),
        (lambda: kv.engine.StopStrings([""], text_of), r"texts is \[''\], expected a list of strings"),
        (
            lambda: kv.engine.StopStrings(["a"], None),  # type: ignore
            "detokenize is None, expected a function",
        ),
        (
            lambda: ask([1], 1, stop_strings=["a"]),
            r"stop_strings is \['a'\], expected kv.engine.StopStrings\(",
        ),
        (
            lambda: plain(prompt_logprobs=True),
            r"prompt_logprobs=True, expected an Engine made for them",
        ),
        (
            lambda: kv.Engine(forward, make_params(), config(), inputs={"a": "no dtype"}),
            r"inputs\['a'\] is 'no",
        ),
        (
            lambda: kv.Engine(
                forward, make_params(), config(), num_drafts=1, inputs=kv.engine.Inputs({}, advance)
            ),
            "got num_drafts = 1 and advance_inputs, expected one of them",
        ),
    ],
)
def test_what_an_engine_did_not_declare_is_refused_in_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def push(**options):
    make_engine().push([ask([1], 1, **options)])


def plain(**options):
    kv.Engine(forward, make_params(), config(), **SIZES).push([ask([1], 1, **options)])


def test_a_request_without_inputs_has_zeros():
    request = ask([3, 1, 4], 9, "a")
    expect(collect(make_engine(), [request]), [request])


def test_a_request_says_what_it_said_when_it_was_made():
    """Whatever its caller does with arrays and lists afterwards, and though texts can be read once."""
    prompt, bias, texts = np.array([3, 1, 4], np.uint32), np.zeros(VOCAB, np.float32), ["never said"]
    request = ask(prompt, 9, "a", inputs={"bias": bias}, stop_strings=kv.engine.StopStrings(texts, text_of))
    prompt[:], bias[5] = 7, 100.0
    texts[0] = text_of(decode_alone(ask([3, 1, 4], 1))[0] * 2)[:1]
    expect(collect(make_engine(), [request]), [ask([3, 1, 4], 9, "a")])
    assert kv.engine.StopStrings(iter(["a"]), text_of).texts == ("a",)  # type: ignore


@pytest.mark.parametrize("kind", [np.int64, int, np.dtype("int64"), jax.ShapeDtypeStruct((), "int64")])
def test_an_input_is_of_the_dtype_that_the_device_has(kind):
    """So that a value which that one does not hold is refused, and not cut."""
    assert [*kv.engine.Inputs({"a": kind}).specs()] == [("a", (), "int32")]


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("uint32", 5, True),
        ("uint32", 2**32, False),
        ("uint32", -1, False),
        ("int8", np.uint64(128), False),
        ("float16", 1e6, False),
        ("float32", np.inf, True),
        ("bool", 1, False),
    ],
)
def test_an_input_is_one_that_its_dtype_holds(dtype, value, fits):
    specs, message = kv.engine.Inputs({"a": dtype}).specs(), ""
    try:
        check_inputs({"a": np.array(value)}, specs)
    except ValueError as error:
        message = str(error)
    assert message.endswith("" if fits else f"expected values of {dtype}[], as the engine declares it")
    assert fits == (message == "")


def test_what_the_logits_do_not_reach_has_no_log_probability():
    """Ids of items, as large or as small as they come."""
    engine = make_engine()
    assert engine.push([ask([1, -1, 2, -5, VOCAB, 3], 1, prompt_logprobs=True)]) == 1
    [logprobs] = [event.prompt_logprobs for event in engine]
    assert np.isnan(logprobs).tolist() == [True, False, True, True, False]
