"""Under `jax.transfer_guard` the library's transfers are explicit, and the caller's own stay guarded."""

import dataclasses
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.core.public_calls import CACHED, CACHED_CALLS, PLAIN, PLAIN_CALLS
from tests.engine.exact_engine import make_engine
from tests.engine.exact_model import make_params
from tests.support import rotary_model, tiny_model
from tests.support.tiny_model import PREFILL_LEN, forward

LIBRARY = str(pathlib.Path(kv.__file__).parent)
PARAMS = tiny_model.make_params()
PROMPTS, TEXT = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9]], [1, 2, 3, 4, 5, 6, 7, 8, 9]
CONFIG = tiny_model.config(enable_prefix_caching=True)
CHUNKED = tiny_model.config(num_blocks=20, extras=[kv.chunks.Store(3, 12)])
HOSTED = tiny_model.config(enable_prefix_caching=True, extras=[kv.tiers.Host(num_blocks=8)])
WEIGHTS = kv.tiers.digest("weights")
OPTIONS = dict(max_new_tokens=4, prefill_len=PREFILL_LEN)
DECODING = kv.decoding


def generate_twice(**options):
    """Its second call finds what the first one left."""
    cache = kv.generate(forward, PARAMS, PROMPTS, CONFIG, **OPTIONS, **options).cache
    kv.generate(forward, PARAMS, PROMPTS, CONFIG, **OPTIONS, **options, cache=cache)


def score_twice():
    cache = None
    for _ in range(2):
        ends = [[1, 2, 3], [4], [], [5, 6]]
        cache = kv.score(forward, PARAMS, TEXT, ends, CONFIG, cache=cache, prefill_len=PREFILL_LEN).cache


def beam_search():
    watch = DECODING.Watch(on_check_in=lambda *_: None, check_in_every=2)
    kv.beam_search(forward, PARAMS, PROMPTS, CONFIG, num_beams=2, stop_tokens=[3], watch=watch, **OPTIONS)


def chunks(selector, **observed):
    reuse = kv.chunks.Reuse(rotate=rotary_model.ROTATE, share=0.3, selector=selector, **observed)
    prompts = kv.chunks.Prompts([TEXT, [4, *TEXT]], [[(0, 8)], [(1, 9)]], reuse)
    cache = kv.generate(rotary_model.forward, PARAMS, prompts, CHUNKED, **OPTIONS).cache
    cache, _ = kv.chunks.evict(cache, 1)
    kv.chunks.free(cache, [0])


def engine_life(placement=None):
    """All that an engine is asked, between the first push and the last event."""
    engine = make_engine(placement=placement)
    store = kv.tiers.AttachedStore(kv.tiers.MemoryStore(), weights=WEIGHTS)
    engine.attach(store)

    def serve():
        engine.push([kv.GenerationRequest(TEXT, 4, num_samples=2), kv.GenerationRequest([1], 9, id="long")])
        engine.drain()
        engine.cancel("long")
        return list(engine)

    serve()
    engine.set_params(make_params(1))
    serve()
    for keep in (True, False):
        engine.release(keep=keep)
        engine.restore()
        serve()
    engine.push([kv.GenerationRequest(TEXT, 4)])
    engine.reset()
    assert list(engine) and engine.figures().running == 0
    store.close()


def manager_life(**options):
    config = tiny_model.config(enable_prefix_caching=True, **options)
    store = kv.tiers.AttachedStore(kv.tiers.MemoryStore(), weights=WEIGHTS)
    with kv.CacheManager(config, store=store) as manager:
        for name in ("a", "b"):
            while not manager.find_stored(TEXT):
                time.sleep(0.01)
            num_cached = manager.allocate_request(name, TEXT)
            manager.run(written, manager.append_tokens(name, TEXT[num_cached:]))
            manager.commit_tokens(name)
        manager.run(written, manager.append_tokens({"a": [1], "b": [2, 3]}))
        manager.fork_request("a", "c")
        manager.truncate_request("c", 3)
        manager.free_request("c")
        with pytest.raises(kv.manager.CacheError):
            while True:
                manager.append_tokens("a", TEXT)
        assert manager.evict(1) == 0 and manager.stats()["num_requests"] == 2


def written(cache, batch):
    return kv.testing.write_tokens(cache, batch.tokens, batch.step), batch.tokens.sum()


def operations():
    """The operations of `public_calls`, given the host's values, on a cache of which two rows are in use."""
    dropping = dataclasses.replace(PLAIN, extras=[kv.compression.Dropping()])
    for config, calls in ((dropping, PLAIN_CALLS), (CACHED, CACHED_CALLS)):
        for name, (call, args, options) in calls.items():
            tokens = {"tokens": np.ones((2, 4), np.int32)} if config is CACHED else {}
            cache = kv.init(config)
            if name not in ("allocate", "draw_block_map"):
                cache, _ = kv.allocate(cache, [0, 1], [4, 4], **tokens)
            if name not in ("extend", "append", "draw_block_map"):
                cache, _ = kv.extend(cache, [3, 2], max_new=4, **tokens)
            if name != "draw_block_map":
                call(cache, *args, **options)
                assert repr(cache) and not kv.check_invariants(cache)


def one_layer():
    cache, step = kv.extend(kv.allocate(kv.init(PLAIN), [0, 1], [4, 4])[0], [1, 1], max_new=1)
    new = np.ones((2, 1, 1, 5), np.float32)
    cache, _ = kv.attention(cache, 0, new, new, new, step, scale=0.5)
    kv.attend(cache, 0, new, step, sink_logits=np.ones(1, np.float32))
    kv.attention_scores(cache, 0, new, step)
    kv.raise_for_status(step.status)
    assert kv.testing.check_tokens(kv.testing.poison(cache), {0: [None], 1: [None]})
    kv.preempt_to_utilization(cache, 0.1)
    kv.reset(cache)


def stores_and_hosts():
    cache = kv.generate(forward, PARAMS, PROMPTS, HOSTED, **OPTIONS).cache
    cache, _ = kv.tiers.demote_to_utilization(cache, 0.0)
    kv.tiers.host_stats(cache)
    cache, _ = kv.tiers.prefetch(cache, np.array([TEXT]), [len(TEXT)])
    store = kv.tiers.MemoryStore()
    kv.tiers.save(cache, store, weights=WEIGHTS)
    for prompts in (None, PROMPTS):
        loaded, _ = kv.tiers.load(store, kv.init(HOSTED), weights=WEIGHTS, prompts=prompts)
        kv.tiers.import_blocks(kv.init(HOSTED), kv.tiers.export_blocks(loaded, [0, 1]))
    kv.tiers.copy_prompts(loaded, kv.init(HOSTED), PROMPTS)
    kv.inspect.explain(loaded, PROMPTS[0])


def on_mesh(call):
    """Calls where the heads are split over two devices, and parameters are on both."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        call(jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P())))


ENTRIES = {
    "samples": lambda: generate_twice(
        num_samples=2, sampling=DECODING.SamplingParams(temperature=0.7, seed=3), stop_tokens=[3]
    ),
    "stop strings": lambda: generate_twice(stop_strings=DECODING.StopStrings(["12"], str)),
    "drafts": lambda: generate_twice(
        drafts=DECODING.Drafts(2, kv.Draft(forward, PARAMS, tiny_model.config()))
    ),
    "score": score_twice,
    "beam_search": beam_search,
    "chunks": lambda: chunks("first"),
    "chunks that are observed": lambda: chunks("key deviation", observe=rotary_model.first_two),
    "engine": engine_life,
    "engine on a mesh": lambda: engine_life(
        kv.engine.Placement(jax.make_mesh((2,), ("rows",)), row_axis="rows")
    ),
    "manager": manager_life,
    "manager on a mesh": lambda: on_mesh(lambda _: manager_life(head_axis="heads")),
    "generate on a mesh": lambda: on_mesh(
        lambda params: kv.generate(
            forward,
            params,
            PROMPTS,
            tiny_model.config(head_axis="heads", enable_prefix_caching=True),
            **OPTIONS,
        )
    ),
    "operations": operations,
    "a layer": one_layer,
    "stores and hosts": stores_and_hosts,
    "check_forward": lambda: kv.testing.check_forward(
        lambda tokens, cache, step: forward(PARAMS, tokens, cache, step), tiny_model.config(), vocab_size=16
    ),
}


@pytest.fixture
def reads(monkeypatch):
    """Lists the reads of the device by lines of the library that are not explicit.

    jax's guard sees none on a CPU, whose arrays the host reads in place.
    """
    found, real_get, getting = [], jax.device_get, []

    def get(tree):
        getting.append(tree)
        try:
            return real_get(tree)
        finally:
            getting.pop()

    def note(name):
        frame = sys._getframe(2)
        if getting or jax.config.jax_transfer_guard_device_to_host == "allow":
            return
        if frame.f_code.co_filename.startswith(LIBRARY):
            found.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")

    def noted(name, function, *, is_method):
        def call(*args, **kwargs):
            first = args[0] if args else None
            if is_method or (isinstance(first, jax.Array) and not isinstance(first, jax.core.Tracer)):
                note(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(jax, "device_get", get)
    array = type(jnp.arange(1))
    for name in ("__array__", "__bool__", "__float__", "__index__", "__int__", "__iter__", "item", "tolist"):
        monkeypatch.setattr(array, name, noted(name, getattr(array, name), is_method=True))
    for name in ("array", "asarray", "flatnonzero", "stack", "unique"):
        monkeypatch.setattr(np, name, noted(f"np.{name}", getattr(np, name), is_method=False))
    return found


@pytest.mark.quick_cases("samples", "engine", "manager", "operations", "a layer")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_caller_may_disallow_implicit_transfers(name, reads, capfd):
    """In all threads; and is told of none by a guard that logs them."""
    for level in ("disallow", "log"):
        jax.config.update("jax_transfer_guard", level)
        try:
            ENTRIES[name]()
        except jax.errors.JaxRuntimeError as error:
            raise AssertionError(str(error)) from error
        finally:
            jax.config.update("jax_transfer_guard", None)
    assert "transfer:" not in capfd.readouterr().err and not reads


def test_the_callers_own_transfers_stay_guarded():
    """In callbacks, in functions of stores, and in what a step function is given."""
    levels = []

    def note(*_):
        levels.append(jax.config.jax_transfer_guard_host_to_device)
        levels.append(jax.config.jax_transfer_guard_device_to_host)

    class Noting(kv.tiers.MemoryStore):
        def __getattribute__(self, name):
            note()
            return super().__getattribute__(name)

    with jax.transfer_guard("disallow"):
        options = dict(config=CONFIG, **OPTIONS)
        stops = DECODING.StopStrings(["12"], lambda tokens: [note(), str(tokens)][1])
        watch = DECODING.Watch(on_tokens=note, on_check_in=note, check_in_every=2)
        cache = kv.generate(forward, PARAMS, PROMPTS, stop_strings=stops, watch=watch, **options).cache
        watch = DECODING.Watch(on_check_in=note)
        kv.beam_search(forward, PARAMS, PROMPTS, num_beams=2, watch=watch, **options)
        kv.tiers.load(store := Noting(), kv.init(CONFIG), weights=WEIGHTS)
        kv.tiers.save(cache, store, weights=WEIGHTS)
        kv.tiers.load(store, kv.init(CONFIG), weights=WEIGHTS)
        with kv.CacheManager(CONFIG) as manager:
            with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
                manager.run(lambda cache, x: (cache, x), np.ones(2))
    assert len(levels) > 20 and {*levels} == {"disallow"}


def test_a_cache_may_be_on_another_device():
    """Nothing is put on the default one first."""
    cache = kv.init(PLAIN)
    cache = jax.device_put(kv.allocate(cache, [0], [4])[0], jax.devices()[1])
    with jax.transfer_guard("disallow"):
        try:
            _, rows = kv.preempt_to_utilization(cache, 0.0)
        except jax.errors.JaxRuntimeError as error:
            raise AssertionError(str(error)) from error
    assert rows.tolist() == [0, 2]


def test_a_caller_may_disallow_explicit_transfers_too():
    cache = kv.init(PLAIN)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            kv.free(cache, [0])
