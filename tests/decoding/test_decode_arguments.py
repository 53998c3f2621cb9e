"""What generate, score and beam_search make of their arguments, and what they refuse before anything runs."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import kvcache_jax as kv
from kvcache_jax.decoding.arguments import committed_shardings
from kvcache_jax.decoding.host import row_list
from tests.support.tiny_model import PREFILL_LEN, config, forward, make_params

PARAMS = make_params()


def generate(prompts=((1, 2), (3,)), sizes=None, **options):
    options = {"max_new_tokens": 9, "prefill_len": PREFILL_LEN, **options}
    return kv.generate(forward, PARAMS, prompts, config(**(sizes or {})), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 has 0 tokens, expected at least 1"),
        ({"prompts": [[1] * 48]}, "prompt 0 has 48 tokens, expected fewer than max_seq_len = 48"),
        (
            {"prompts": [[1] * 30], "sizes": {"num_blocks": 7}},
            "needs 8 blocks, expected at most num_blocks = 7",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_samples": 0}, "num_samples is 0, expected 1 <= num_samples"),
        ({"num_samples": 2**70}, "expected 1 <= num_samples <= 2..31"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, expected an integer"),
        (
            {"prompts": [[1], [2]], "sampling": kv.decoding.SamplingParams(seed=[1])},
            "seed has 1 values, expected one or 2, one",
        ),
        ({"stop_tokens": [2**40]}, "stop_tokens has the token id 1099511627776, expected"),
        ({"stop_tokens": [3.7]}, "stop_tokens has dtype float64, expected integers"),
        (
            {"sampling": 0.8},
            r"sampling is 0.8, expected kv.decoding.SamplingParams\(temperature, top_k, top_p, min_p, seed\)",
        ),
        ({"sampling": None}, r"sampling is None, expected kv.decoding.SamplingParams\("),
        ({"stop_strings": ["x"]}, r"is \['x'\], expected kv.decoding.StopStrings\(texts, detokenize\)"),
        ({"drafts": 3}, r"drafts is 3, expected kv.decoding.Drafts\(num_drafts, draft\)"),
        (
            {"watch": print},
            r"watch is <built-in .*, expected kv.decoding.Watch\(on_tokens, on_check_in, check_in_every\)",
        ),
        ({"prompts": None}, "prompts is None, expected a list of prompts, each a list of token ids"),
        (
            {"prompts": [[10**30]]},
            "prompt 0 has 1000000000000000000000000000000, expected integers of at most",
        ),
        ({"stop_tokens": np.array([1, 2**31 + 5], np.uint32)}, "has the token id 2147483653, expected 0 to"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(**options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (kv.decoding.SamplingParams, dict(seed=-1), "seed is -1, expected at least 0"),
        (kv.decoding.SamplingParams, dict(seed="1"), "seed is '1', expected an integer"),
        (kv.decoding.SamplingParams, dict(seed=(1, -1)), r"seed\[1\] is -1, expected at least 0"),
        (kv.decoding.SamplingParams, dict(seed=[[1], [1, 2]]), r"seed\[0\] is \[1\], expected an integer"),
        (kv.decoding.SamplingParams, dict(temperature=-1.0), "temperature is -1.0, expected 0 to 8e37"),
        (kv.decoding.SamplingParams, dict(temperature="1"), "temperature is '1', expected a finite number"),
        # One per row: which prompt gets which row is the loop's own affair.
        (
            kv.decoding.SamplingParams,
            dict(temperature=[0.0, 1.0, 2.0, 3.0]),
            r"temperature has shape \(4,\), expected one number, for all prompts",
        ),
        (kv.decoding.SamplingParams, dict(top_k=np.zeros(4, int)), r"top_k has shape \(4,\), expected one"),
        (
            kv.decoding.SamplingParams,
            dict(top_k=10**30),
            "top_k is 1000000000000000000000000000000, expected 0",
        ),
        (
            kv.decoding.SamplingParams,
            dict(min_p=[[1], [2, 3]]),
            r"min_p is \[\[1\], \[2, 3\]\], expected one number",
        ),
        (kv.decoding.SamplingParams, dict(top_k=2.0), "top_k is 2.0, expected an integer"),
        (kv.decoding.SamplingParams, dict(top_p=0), "top_p is 0.0, expected above 0, at most 1"),
        (kv.decoding.SamplingParams, dict(min_p=1.5), r"min_p is 1.5, expected in \[0, 1\]"),
        (kv.decoding.Drafts, dict(num_drafts=0), "num_drafts is 0, expected at least 1"),
        (
            kv.decoding.Drafts,
            dict(num_drafts=1, draft=forward),
            r"draft is a function, expected kv.Draft\(forward, params, config\)",
        ),
        (
            kv.decoding.StopStrings,
            dict(texts=["x", ""], detokenize=str),
            "texts has '', expected texts of at",
        ),
        (
            kv.decoding.StopStrings,
            dict(texts="xy", detokenize=str),
            r"texts is 'xy', expected a list of texts: \['xy'\]",
        ),
        (
            kv.decoding.StopStrings,
            dict(texts=None, detokenize=str),
            "texts is None, expected a list of texts",
        ),
        (kv.decoding.StopStrings, dict(texts=["a"], detokenize=5), "detokenize is 5, expected a function"),
        (
            kv.decoding.PreparedForward,
            dict(forward=forward, prepare=None),
            "prepare is None, expected a function",
        ),
        (kv.decoding.Watch, dict(check_in_every=-1), "check_in_every is -1, expected at least 1"),
        (kv.decoding.Watch, dict(check_in_every=0), "check_in_every is 0, expected at least 1"),
        (kv.decoding.Watch, dict(on_tokens=5), "on_tokens is 5, expected a function, or None"),
        (kv.decoding.Watch, dict(on_check_in="x"), "on_check_in is 'x', expected a function, or None"),
    ],
)
def test_a_value_of_options_is_checked_when_it_is_made(make, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


def test_numbers_of_any_type_make_equal_values():
    made = kv.decoding.SamplingParams(jnp.float32(0.5), np.int64(3), np.array(1.0), 0, np.arange(2))
    assert made == kv.decoding.SamplingParams(0.5, 3, seed=[0, 1])
    assert hash(made) == hash(kv.decoding.SamplingParams(0.5, 3, seed=(0, 1))) and made.seed == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, expected an integer"),
        ({"num_beams": 0}, "num_beams is 0, expected at least 1"),
        ({"watch": 3}, r"watch is 3, expected kv.decoding.Watch\("),
        (
            {"watch": kv.decoding.Watch(print)},
            "watch has on_tokens, expected on_check_in alone: which tokens a search finds",
        ),
        ({"prefill_len": 0}, "prefill_len is 0, expected at least 1"),
        ({"stop_tokens": [2**40]}, "stop_tokens has the token id 1099511627776"),
        ({"length_penalty": float("nan")}, "length_penalty is nan, expected a finite number"),
        ({"length_penalty": -np.inf}, "length_penalty is -inf, expected a finite number"),
        (
            {"length_penalty": 400},
            "length_penalty is 400.0, expected at most 41.9 above or below 0 for max_new_tokens = 3:",
        ),
        ({"max_new_tokens": 10**30}, r"1000000000000000000000000000000 new tokens, expected at most"),
        ({"length_penalty": -42}, "length_penalty is -42.0, expected at most 41.9"),
        ({"length_penalty": 10**400}, "length_penalty is 1000.*, expected a finite number"),
    ],
)
def test_a_beam_search_refuses_bad_input(options, message):
    options = {"prompts": [[1, 2]], "max_new_tokens": 3, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        kv.beam_search(forward, PARAMS, options.pop("prompts"), config(), **options)


@pytest.mark.slow
def test_texts_to_stop_at_may_be_iterated_over_once():
    plain = generate().generations[0].tokens
    texts = (str(token) for token in plain[2:3])
    stopped = generate(stop_strings=kv.decoding.StopStrings(texts, lambda tokens: " ".join(map(str, tokens))))
    assert stopped.generations[0].finish_reason == "stop"
    assert stopped.generations[0].tokens == plain[: 1 + plain.index(plain[2])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "detokenize"), [("list", lambda tokens: ["x"]), ("bytes", bytes)])
def test_a_detokenize_that_returns_no_text_is_refused(kind, detokenize):
    with pytest.raises(TypeError, match=f"detokenize returned a {kind}, expected a str"):
        generate(stop_strings=kv.decoding.StopStrings(["x"], detokenize))


@pytest.mark.slow
@pytest.mark.parametrize("check_in_every", [1, 2, 3])
def test_texts_to_stop_at_count_though_later_tokens_hide_them(check_in_every):
    """As some tokenizers show a whole run of bytes as unknown while its last character is unfinished."""
    streamed = [], []
    result = generate(
        stop_strings=kv.decoding.StopStrings(
            ["xxxx"], lambda tokens: "" if len(tokens) in (5, 6) else "x" * len(tokens)
        ),
        watch=kv.decoding.Watch(
            on_tokens=lambda prompt_id, sample_id, tokens: streamed[prompt_id].extend(tokens),
            check_in_every=check_in_every,
        ),
    )
    for generation, tokens in zip(result.generations, streamed, strict=True):
        assert (len(generation.tokens), generation.finish_reason) == (4, "stop")
        assert tokens == generation.tokens


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (kv.Draft(None, PARAMS, config()), "forward is None, expected a model: "),
        (kv.Draft(forward, PARAMS, None), "kv.Draft got a NoneType, expected a CacheConfig"),
        (
            kv.Draft(forward, PARAMS, config(max_seqs=3)),
            "the draft's cache has 3 rows of 48 tokens, expected 4",
        ),
    ],
)
def test_what_is_refused_leaves_the_callers_cache_alone(draft, message):
    cache = kv.init(config())
    with pytest.raises((ValueError, TypeError), match=message):
        generate(cache=cache, drafts=kv.decoding.Drafts(1, draft))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


@pytest.mark.slow
def test_what_is_no_cache_or_config_is_refused_by_name():
    calls = {
        "generate": lambda config, **cache: kv.generate(
            forward, PARAMS, [[1]], config, max_new_tokens=2, **cache
        ),
        "score": lambda config, **cache: kv.score(forward, PARAMS, [1], [[2]], config, **cache),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} got a NoneType, expected a CacheConfig"):
            call(None)
        with pytest.raises(TypeError, match=f"{name} got a CacheConfig, expected a Cache: "):
            call(config(), cache=config())
        used = kv.init(config())
        call(config(), cache=used)
        assert not used.is_active.is_deleted()  # only its pools were donated
        with pytest.raises(ValueError, match=f"{name} got a cache that was donated, .*, expected the cache"):
            call(config(), cache=used)
        with pytest.raises(ValueError, match="CacheManager got a cache that was donated"):
            kv.CacheManager(used)
        assert kv.check_invariants(used) == [] and "donated" not in repr(used)  # who need no keys and values
    with pytest.raises(TypeError, match="beam_search got a NoneType, expected a CacheConfig"):
        kv.beam_search(forward, PARAMS, [[1]], None, max_new_tokens=2)
    with pytest.raises(TypeError, match="continuations is 3, expected a list of continuations"):
        kv.score(forward, PARAMS, [1], 3, config())


def host_loops(forward):
    """Calls of all three, on parameters."""
    return {
        "generate": lambda params: kv.generate(forward, params, [[1]], config(), max_new_tokens=2),
        "beam_search": lambda params: kv.beam_search(forward, params, [[1]], config(), max_new_tokens=2),
        "score": lambda params: kv.score(forward, params, [1], [[2]], config()),
    }


def test_arrays_of_two_devices_are_refused():
    """Of a model, of a cache from a call elsewhere, and of a draft model; the cache stays whole."""
    devices = jax.devices()[:2]
    pattern = "{} has arrays committed to .*0 and {} to .*1, expected all on the same"
    apart = {name: jax.device_put(x, devices[i % 2]) for i, (name, x) in enumerate(PARAMS.items())}
    here, cache = jax.device_put(PARAMS, devices[0]), jax.device_put(kv.init(config()), devices[1])
    drafts = kv.decoding.Drafts(1, kv.Draft(forward, jax.device_put(PARAMS, devices[1]), config()))
    options = dict(max_new_tokens=2)
    for call in host_loops(forward).values():
        with pytest.raises(ValueError, match=pattern.format("params", "others")):
            call(apart)
    with pytest.raises(ValueError, match=pattern.format("params", "cache")):
        kv.score(forward, here, [1], [[2]], config(), cache=cache)
    with pytest.raises(ValueError, match=pattern.format("params", "cache")):
        kv.generate(forward, here, [[1]], config(), cache=cache, **options)
    with pytest.raises(ValueError, match=pattern.format("params", "draft")):
        kv.generate(forward, here, [[1]], config(), drafts=drafts, **options)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    # Arrays that no caller has put anywhere go where the others are.
    assert {*committed_shardings(params=PARAMS, cache=cache)} == {SingleDeviceSharding(devices[1])}


def test_a_loop_of_the_host_is_not_traced():
    for name, call in host_loops(forward).items():
        message = (
            f"^{name} is called within jit, grad or another transformation, expected outside of all: .*;"
        )
        for transformed in (jax.jit(call), jax.jit(lambda _, call=call: call(PARAMS)), jax.grad(call)):
            with pytest.raises(TypeError, match=message):
                transformed(PARAMS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits, cache: (cache, logits), r"\(Cache, .*\[4, \d+, 16\]\), expected \(logits, cache\)"),
        (lambda logits, cache: cache, r"\(Cache\), expected"),
        (lambda logits, cache: logits, r"\(float32\[4, \d+, 16\]\), expected"),
        (lambda logits, cache: None, r"\(NoneType\), expected"),
        (
            lambda logits, cache: (logits[:, 0], cache),
            r"logits .*\[4, 16\] for tokens int32\[4, \d+\], expected",
        ),
        (lambda logits, cache: (logits.astype(int), cache), r"logits .*, expected floats \[n, T, vocab\]"),
        (lambda logits, cache: (logits, kv.init(config(num_blocks=7))), "a cache of another config, exp"),
        (
            lambda logits, cache: (logits, dataclasses.replace(cache, pools=())),
            r"nothing as Cache.pools\[0\]",
        ),
    ],
    ids=["swapped", "cache", "logits", "nothing", "last logits", "integers", "other cache", "no pools"],
)
def test_what_a_model_returns_is_checked(wrong, message):
    class Model:  # whose code is not made a function anew for each case, which is warned of
        def __call__(self, *args):
            return wrong(*forward(*args))

    for call in host_loops(Model()).values():
        with pytest.raises(TypeError, match=f"^forward returned {message}"):
            call(PARAMS)


def test_a_draft_model_of_another_vocabulary_is_refused():
    def wider(*args):
        logits, cache = forward(*args)
        return jnp.pad(logits, ((0, 0), (0, 0), (0, 1))), cache

    draft, cache = kv.Draft(wider, PARAMS, config()), kv.init(config())
    with pytest.raises(
        ValueError, match="draft model's logits are for 17 tokens and the model's for 16, expected"
    ):
        generate(cache=cache, drafts=kv.decoding.Drafts(1, draft))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_a_model_without_a_hash_is_refused():
    @dataclasses.dataclass
    class Model:
        def __call__(self, *args):
            return forward(*args)

    message = (
        "^forward is a Model and cannot be hashed .*, expected a function or an object that can be: pass"
    )
    draft = kv.Draft(Model(), PARAMS, config())
    calls = [
        *host_loops(Model()).values(),
        lambda params: kv.generate(
            forward, params, [[1]], config(), max_new_tokens=2, drafts=kv.decoding.Drafts(1, draft)
        ),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call(PARAMS)


@dataclasses.dataclass
class Module:
    """As Equinox's: a pytree, with no hash where it holds arrays."""

    weights: dict
    activation: Callable = jnp.tanh

    def __call__(self, tokens, cache, step):
        return forward(self.weights, tokens, cache, step)


jax.tree_util.register_dataclass(Module, ["weights", "activation"], [])


def call_module(module, tokens, cache, step):
    return module(tokens, cache, step)


def test_a_module_is_told_to_part_with_its_arrays():
    module = Module(PARAMS)
    part = re.escape("params, static = eqx.partition(module, eqx.is_array), and a function")
    for call in host_loops(module).values():
        with pytest.raises(TypeError, match=f"^forward is a Module that holds arrays, expected a .*{part}"):
            call(PARAMS)
    for call in host_loops(module.__call__).values():
        expected = re.escape(
            "(tokens, cache, step), expected (params, tokens, cache, step) -> (logits, cache)"
        )
        with pytest.raises(TypeError, match=f"^forward takes {expected}: wrap a module's method"):
            call(PARAMS)
    for call in host_loops(call_module).values():
        with pytest.raises(TypeError, match=f"^params.activation is <.*, expected arrays alone: {part}"):
            call(module)


@pytest.mark.parametrize("leaf", ["text", b"text", {1}, np.array([None])], ids=repr)
def test_what_is_no_array_is_no_parameter(leaf):
    for call in host_loops(forward).values():
        with pytest.raises(TypeError, match=r"^params\['more'\] is .*, expected arrays alone: "):
            call(PARAMS | {"more": leaf})


def test_a_function_made_for_each_call_is_warned_of_once():
    def score_with(make):
        models = [make() for _ in range(4)]  # all are alive, so that none has the address of another
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for model in models:
                with pytest.raises(TypeError, match="continuations is 3"):  # before anything is compiled
                    kv.score(model, PARAMS, [1], 3, config())
        return [(w.filename, str(w.message)) for w in caught]

    assert score_with(lambda: forward) == []
    ((filename, message),) = score_with(lambda: lambda *args: forward(*args))
    assert filename == __file__
    assert message.startswith("forward is function number 3 made of test_a_function_made_for_each_call")
    assert message.endswith("and pass what it closes over as params")
    assert len(score_with(lambda: functools.partial(call_forward, None))) == 1


def call_forward(_, *args):
    return forward(*args)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([2**40 + 3], "has the token id 1099511627779, expected -2147483648 to 2147483647"),
        ([1, -1], "has the token id -1, expected 0 to 2147483647"),
        ([1.5, 2.7], "has dtype float64, expected integers"),
        ([True], "has dtype bool, expected integers"),
        ("abc", "is 'abc', expected integer token ids: encode the text first"),
        ([[1, 2]], r"is a list of shape \(1, 2\), expected a list of token ids"),
        ((token for token in [1]), r"is a generator of shape \(\), expected a list of token ids"),
    ],
)
def test_token_ids_are_checked_alike(tokens, message):
    for name, call in {
        "prompt 1": lambda: generate([[1], tokens]),
        "prompt 0": lambda: kv.beam_search(forward, PARAMS, [tokens], config(), max_new_tokens=2),
        "context": lambda: kv.score(forward, PARAMS, tokens, [[1]], config()),
        "continuation 0": lambda: kv.score(forward, PARAMS, [1], [tokens], config()),
    }.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name} {message}"):
            call()


def test_lists_of_rows_have_few_lengths():
    assert row_list([3, 1], 4).tolist() == [3, 1, 4, 4]
    assert {len(row_list(range(n), 100)) for n in range(101)} == {8, 16, 32, 64, 100}
    assert row_list(range(9), 16).tolist() == [*range(9), *[16] * 7]
