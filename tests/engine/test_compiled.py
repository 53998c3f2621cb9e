"""One compiled program, whatever the parameters are committed to, and no `push` waits for it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvcache_jax as kv
from tests.engine.exact_engine import SIZES, ask, expect
from tests.engine.exact_model import collect, config, forward, make_params
from tests.support.helpers import compiled_programs

DEVICES = jax.devices()
PAIR = Mesh(np.array(DEVICES[2:4]), ("model",))
FORMS = {
    "numpy": lambda params: params,
    "on no device in particular": lambda params: jax.tree.map(jnp.asarray, params),
    "committed to the default device": lambda params: jax.device_put(params, DEVICES[0]),
    "committed to a mesh": lambda params: jax.device_put(params, NamedSharding(PAIR, PartitionSpec())),
    "committed to another device": lambda params: jax.device_put(params, DEVICES[3]),
    "some of them committed": lambda params: params | {"shift": jax.device_put(params["shift"], DEVICES[0])},
    "a Python number": lambda params: params | {"shift": int(params["shift"])},
}


def fresh_engine(params, **options):
    """An engine of a model that this process has no program for; other models left one on the disk."""

    def model(params, tokens, cache, step, logits_at=None):
        return forward(params, tokens, cache, step, logits_at)

    return lambda form: kv.Engine(model, form(params), config(num_blocks=11), **SIZES | options)


@pytest.mark.quick_cases("one device")
@pytest.mark.parametrize("num_firsts", [pytest.param(3, id="one device"), pytest.param(4, id="a mesh too")])
def test_parameters_in_any_form_are_served_by_one_program(num_firsts):
    """One at each place where an engine may live: the first three forms have the same."""
    requests = [ask([i, 5, 3], 4, i) for i in range(2)]
    make, num_programs = fresh_engine(make_params(shift=1)), []
    for first in list(FORMS)[:num_firsts]:
        engine, others = make(FORMS[first]), [form(make_params(shift=2)) for form in FORMS.values()]
        with compiled_programs() as programs:
            found = [collect_all(engine, requests)]
            for params in others:
                engine.set_params(params)
                found.append(collect_all(engine, requests))
        for i, said in enumerate(found):
            expect(said, requests, shift=min(i + 1, 2))
        num_programs.append(len(programs))
        devices = engine.state.cache.pools[0].k.devices()
        assert devices == ({*DEVICES[2:4]} if first == "committed to a mesh" else {DEVICES[0]})
    assert num_programs == [1, 0, 0, 1][:num_firsts]


def collect_all(engine, requests):
    """As `collect`, which looks into the state, without programs of its own."""
    said = {}
    assert engine.push(requests) == len(requests)
    for event in engine:
        tokens, _, _ = said.get((event.id, 0), ([], [], None))
        said[event.id, 0] = (tokens + event.tokens, [], event.finish_reason)
    return said


def test_a_number_of_a_weak_type_is_exchanged_for_one():
    engine = fresh_engine(make_params() | {"more": 1.0})(lambda params: params)
    with pytest.raises(
        ValueError, match=r"params\['more'\] is float32\[\], expected a Python number, float32"
    ):
        engine.set_params(make_params() | {"more": np.float32(2)})
    engine.set_params(make_params() | {"more": 2.0})


def test_parameters_on_two_devices_are_refused():
    params = make_params()
    apart = {name: jax.device_put(x, DEVICES[i]) for i, (name, x) in enumerate(params.items())}
    fix = r"expected all on the same: jax.device_put\(params, device\), or Engine\(placement=\)"
    with pytest.raises(ValueError, match="committed to .*0 and others to .*1, " + fix):
        kv.Engine(forward, apart, config(num_blocks=11), **SIZES)


def test_a_push_does_not_wait_while_the_program_is_compiled():
    """Traced, lowered and compiled: at each of them another thread pushes, cancels and looks."""
    requests, waited = [ask([i, 5], 4, i) for i in range(3)], []

    def from_elsewhere():
        i = len(waited) + 1
        thread = threading.Thread(target=lambda: (engine.push(requests[i : i + 1]), engine.figures()))
        thread.start()
        thread.join(timeout=10)
        waited.append(thread.is_alive())

    def model(params, tokens, cache, step, logits_at=None):
        if len(waited) < 1:
            from_elsewhere()
        return forward(params, tokens, cache, step, logits_at)

    def note(event, duration_secs, **_):
        if "backend_compile" in event and len(waited) == 1:
            from_elsewhere()

    engine = kv.Engine(model, make_params(), config(num_blocks=11), **SIZES)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert engine.push(requests[:1]) == 1
        said = collect(engine, [])
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert waited == [False, False]
    expect(said, requests)


def test_parameters_are_taken_apart_once():
    """Not at each dispatch: of a module of many parts it takes longer than all else that the host does."""
    num_times = [0]

    class Module(dict):
        """Parameters of a class of their own."""

    def take_apart(module):
        num_times[0] += 1
        names = sorted(module)  # as of a dict, with which it shares a program on the disk
        return tuple(module[name] for name in names), tuple(names)

    jax.tree_util.register_pytree_node(Module, take_apart, lambda keys, x: Module(zip(keys, x, strict=True)))
    engine = kv.Engine(forward, Module(make_params()), config(num_blocks=11), **SIZES)
    requests = [ask([i, 3], 12, i) for i in range(3)]
    expect(collect(engine, requests[:1]), requests[:1])
    before = num_times[0]
    expect(collect(engine, requests), requests)
    assert num_times[0] == before
    engine.set_params(Module(make_params(shift=1)))
    assert num_times[0] > before
    expect(collect(engine, requests), requests, shift=1)
