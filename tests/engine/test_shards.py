"""The engine on a mesh: rows over one axis, a scheduler each, heads over the other."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from tests.engine import exact_model
from tests.engine.exact_engine import SIZES, expect, serve
from tests.engine.exact_model import DIM, check_state, config, make_params, random_request
from tests.engine.exact_model import forward_of_halves as forward
from tests.support.helpers import compiled_programs


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["heads", "context"])
def test_rows_over_one_axis_and_heads_or_context_over_the_other(axis):
    """The same tokens as each request alone; every shard had requests, and nothing is left behind."""
    mesh = jax.make_mesh((4, 2), ("rows", axis))
    splits_heads = axis == "heads"
    layers = [kv.FullAttention(2 if splits_heads else 1, DIM)]
    split = kv.CacheConfig(
        layers,
        num_blocks=11,
        block_size=4,
        max_seqs=4,
        max_seq_len=48,
        enable_prefix_caching=True,
        **{"head_axis" if splits_heads else "context_axis": axis},
    )
    model = forward if splits_heads else exact_model.forward
    engine = kv.Engine(model, make_params(), split, **SIZES, placement=kv.engine.Placement(mesh, "rows"))
    rng = np.random.default_rng(11)
    requests = [random_request(rng, i) for i in range(24)]
    assert config().max_seqs == split.max_seqs
    with compiled_programs() as programs:
        said = serve(engine, requests)
    assert len(programs) == 1
    expect(said, requests)
    state = engine.state
    keys = state.cache.pools[0].k
    assert keys.sharding.shard_shape(keys.shape) == (
        (1, 11, 1, 4, DIM) if splits_heads else (1, 11, 1, 2, DIM)
    )
    for i in range(4):
        check_state(jax.tree.map(lambda x, i=i: x[i], jax.device_get(state)))
        counts = np.asarray(state.counters)[i]
        assert counts[kv.engine.Counter.GENERATED_TOKENS] > 0
    assert engine.figures().counts[kv.engine.Counter.PREEMPTIONS] > 0
    assert engine.figures().blocks_used == 0


def test_a_prompt_goes_where_its_beginning_went():
    """Unless there is more to do than that spares; another tenant's, or other weights', count for nothing."""
    mesh, beginning = Mesh(np.array(jax.devices()[:2]), ("rows",)), [7] * 9
    engine = kv.Engine(
        exact_model.forward,
        make_params(),
        config(enable_prefix_caching=True),
        **SIZES,
        placement=kv.engine.Placement(mesh, "rows"),
    )

    def places(*prompts, **options):
        """The shards that prompts go to, one after the other; they end before they are computed."""
        requests = [kv.GenerationRequest(prompt, 2, id=i, **options) for i, prompt in enumerate(prompts)]
        assert engine.push(requests) == len(requests)
        return [next(i for i, table in enumerate(engine._tables) if j in table) for j in range(len(requests))]

    def end():
        for table in engine._tables:
            for sample in table:
                engine.cancel(sample.id)

    rounds = [
        (([1] * 5, beginning), {}, [0, 1]),
        ((beginning,), {"namespace": kv.namespace(tenant="a")}, [0]),
        (([*beginning, 5],), {}, [1]),
        (([*beginning[:-1], 5], [8] * 5, [*beginning, 6, 6, 6], [*beginning, 4]), {}, [1, 0, 1, 0]),
        ((beginning[:4],), {}, [0]),  # whose one block has its last token
    ]
    for prompts, options, expected in rounds:
        assert places(*prompts, **options) == expected
        end()
    engine.set_params(make_params(1))
    assert places(beginning) == [0]
    end()
    assert places([1] * 9, [2] * 9) == [0, 1]
    engine.reset()
    end()
    assert places([2] * 9) == [0]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda mesh: kv.engine.Placement(None, "rows"), "mesh is None, expected a jax.sharding.Mesh"),
        (
            lambda mesh: kv.engine.Placement(mesh, "rows"),
            r"row_axis is 'rows' and there is a mesh with the axes \('data',\), expected it among",
        ),
        (
            lambda mesh: mesh,
            r"placement is Mesh.*, expected kv.engine.Placement\(mesh, row_axis, params_spec, team\)",
        ),
        (lambda mesh: None, "config.head_axis is 'heads' and there is no mesh, expected it among"),
        (lambda mesh: kv.engine.Placement(mesh), "config.head_axis is 'heads' and there is a mesh with"),
    ],
)
def test_an_axis_must_be_one_of_the_mesh(place, message):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    with pytest.raises((ValueError, TypeError), match=message):
        kv.Engine(forward, make_params(), config(head_axis="heads"), placement=place(mesh))


def test_an_axis_splits_one_thing():
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    layers, sizes = [kv.FullAttention(2, DIM)], dict(block_size=4, max_seqs=2, max_seq_len=8)
    for option in ("head_axis", "context_axis"):
        split = kv.CacheConfig(layers, **sizes, **{option: "rows"})
        with pytest.raises(Exception) as raised:  # jax has an error of its own
            kv.Engine(forward, make_params(), split, placement=kv.engine.Placement(mesh, "rows"))
        assert "expected different axes: 'rows' cannot split two of rows, heads" in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            P("data"),
            ValueError,
            r"params_spec is P\('data',\), expected each of the mesh's axes \('rows',\) on",
        ),
        (
            {"big": P("rows", "rows")},
            ValueError,
            r"params_spec\['big'\] is .*, expected each of the mesh's ax",
        ),
        ({"small": P()}, ValueError, "params_spec is .*, expected a prefix of the tree of params"),
        ("rows", TypeError, "params_spec is 'rows', expected a PartitionSpec"),
        (P("rows"), ValueError, r"for parameters of the shape \(3, 4\), expected dimensions that the mesh"),
        (P(None, None, "rows"), ValueError, r"for parameters of the shape \(3, 4\), expected dimensions th"),
    ],
)
def test_specs_that_do_not_fit_parameters(spec, error, message):
    mesh, params = Mesh(np.array(jax.devices()[:2]), ("rows",)), {"big": np.zeros((3, 4), np.float32)}
    with pytest.raises(error, match=message):
        kv.Engine(forward, params, config(), placement=kv.engine.Placement(mesh, "rows", spec))


def test_an_explicit_mesh_is_a_mesh_too():
    """As `jax.make_mesh` makes it; the caller may have set it, or another one."""
    mesh = jax.make_mesh((2,), ("rows",))
    placement, other = kv.engine.Placement(mesh, "rows"), Mesh(np.array(jax.devices()[2:6]), ("data",))
    texts, refused = [], None
    try:
        with jax.set_mesh(other):
            engine = kv.Engine(
                exact_model.forward, make_params(), config(num_blocks=11), **SIZES, placement=placement
            )
        for each in (None, mesh, other):
            with contextlib.nullcontext() if each is None else jax.set_mesh(each):
                texts.append(engine.lower().as_text())
    except ValueError as error:
        refused = error
    assert refused is None and texts[0] == texts[1] == texts[2]


@pytest.mark.quick_cases("made where another mesh is set")
@pytest.mark.parametrize(
    ("made_in", "sees"),
    [(slice(1, 3), ()), (None, ()), (slice(2), ("data",))],
    ids=["made where another mesh is set", "made without a mesh", "made in its own"],
)
def test_a_mesh_that_the_caller_sets_later_is_none_of_the_engines(made_in, sees):
    """Without a placement; a thread that drains has not the mesh of the thread which made the engine.

    A model is traced, and a cache shown, in the mesh in which the engine was made, if it lives there.
    """
    devices, params = jax.devices(), make_params()
    if made_in == slice(1, 3):
        params = jax.device_put(params, devices[0])

    def within(chosen, name):
        mesh = chosen and jax.make_mesh((len(devices[chosen]),), (name,), devices=devices[chosen])
        return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)

    def note(result):
        axes.append(jax.sharding.get_abstract_mesh().axis_names)
        return result

    def traced(params, tokens, cache, step):
        return note(exact_model.forward(params, tokens, cache, step))

    texts, axes, refused = [], [], None
    try:
        with within(made_in, "data"):
            engine = kv.Engine(traced, params, config(num_blocks=11), **SIZES)
        for chosen in (slice(3), None):
            with within(chosen, "other"):
                texts.append(engine.lower().as_text())
                engine._device.change_caches(lambda shard, cache: note(cache))
    except ValueError as error:
        refused = error
    assert refused is None and texts[0] == texts[1] and len(axes) > 2 and {*axes} == {sees}


def test_heads_that_a_mesh_does_not_divide():
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    with pytest.raises(
        ValueError, match="the array 'k' of FullAttention layers has 1 heads, and the mesh ax"
    ):
        kv.Engine(forward, make_params(), config(head_axis="heads"), placement=kv.engine.Placement(mesh))
