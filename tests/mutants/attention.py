"""Mutations of attention by XLA and of the pools that it reads; see `mutations.py`."""

from tests.mutants.mutations import BRANCHES, DENSE, GATHER, GROUPED_HEADS, PADDING, in_module

PADDED = f"{DENSE}[float32-1-64-16-1-None-False-None-None-True-False]"
WINDOW = f"{DENSE}[float32-1-8-16-7-(5, 0)-False-None-0.3-False-False]"
SINKS = f"{DENSE}[float32-2-8-1-3-(9, 3)-True-2.5-0.3-True-False]"
HALVES = "attention/test_attention_blind.py::test_write_and_attend_are_the_halves_of_attention"
PREFIX_GRADIENTS = "attention/test_gradients.py::test_gradients_flow_into_the_pools_through_forks_and_copies"
OVERWRITTEN = (
    "attention/test_gradients.py::test_a_slot_that_is_overwritten_passes_no_gradient_to_what_it_held"
)
TILES = "attention/test_attention_tiles.py::test_attention_over_several_tiles"
TILE_GRADIENTS = "attention/test_attention_tiles.py::test_gradients_over_several_tiles"
COPIED = "attention/test_gradients.py::test_a_copied_block_passes_no_gradient_to_what_stood_there"

MUTATIONS = [
    *in_module(
        "blocks/storage",
        (
            "keys and values swapped on write",
            "offset, k), v=_store(pool.v, block, offset, v)",
            "offset, v), v=_store(pool.v, block, offset, k)",
            BRANCHES,
        ),
        (
            "block id shifted on write",
            "quotient(slots, block_size)",
            "1 + quotient(slots, block_size)",
            BRANCHES,
        ),
        (
            "offset shifted on write",
            "remainder(slots, block_size)",
            "remainder(1 + slots, block_size)",
            BRANCHES,
        ),
        ("layer left out of a block's place", "layer * num_blocks + block_ids", "block_ids", HALVES),
        (
            "nowhere mapped after the layer shift",
            "block_ids < num_blocks, layer *",
            "block_ids < num_rows, layer *",
            PADDING,
        ),
        ("copy without the contents", ".set(pool[layers + src[i]])", ".set(pool[layers + dst[i]])", BRANCHES),
        (
            "copy of the first layer only",
            "jnp.arange(pool.shape[0] // num_blocks,",
            "jnp.arange(1,",
            BRANCHES,
        ),
        ("gather not masked", "jnp.where(is_token[:, None, None],", "jnp.where(True,", GATHER),
        (
            "backward: overwritten slots pass gradients",
            "jnp.zeros_like(grad_values), mode",
            "grad_values, mode",
            OVERWRITTEN,
        ),
        (
            "backward: overwritten blocks pass gradients",
            ".at[layers + dst[i]].set(jnp.zeros_like(moved))",
            "",
            COPIED,
        ),
        ("backward: copies return no gradient", ".add(moved)", ".add(0 * moved)", PREFIX_GRADIENTS),
    ),
    *in_module(
        "attention/xla",
        ("keys and values swapped in attention", "(k_pool, v_pool), num", "(v_pool, k_pool), num", PADDED),
        ("no causal mask", "is_seen = key_pos <= query_pos", "is_seen = key_pos >= 0", GROUPED_HEADS),
        ("tokens do not see themselves", "key_pos <= query_pos", "key_pos < query_pos", PADDED),
        ("no window mask", "(key_pos > query_pos - options.window) |", "(key_pos >= 0) |", WINDOW),
        ("window one token longer", "query_pos - options.window)", "query_pos - options.window - 1)", WINDOW),
        ("sink tokens masked", "(key_pos < options.num_sink_tokens)", "(key_pos < 0)", SINKS),
        (
            "sink columns not read",
            "jnp.where(nth < options.num_sink_blocks, nth,",
            "jnp.where(False, nth,",
            SINKS,
        ),
        (
            "NaN of unowned slots read",
            "v = _clean(_load(v_pool, rows), is_seen)",
            "v = _load(v_pool, rows)",
            PADDED,
        ),
        (
            "a tile with some tokens seen is not cleaned",
            "run_if(~is_seen.all(),",
            "run_if(~is_seen.any(),",
            PADDED,
        ),
        (
            "a layer that does not exist is read",
            "jnp.where(is_layer, q.astype(jnp.float32), jnp.nan)",
            "q.astype(jnp.float32)",
            "operations/test_transforms.py::test_a_traced_layer_that_does_not_exist_writes_nowhere_and_reads_nan",
        ),
        ("scale left out", "k) * options.scale", "k)", PADDED),
        ("soft cap left out", "if options.soft_cap is None:", "if True:", GROUPED_HEADS),
        ("sink logits left out", "peak = peak * 0 + sink_logits", "pass", SINKS),
        (
            "log-sum-exp of half the weights",
            "peak + jnp.log(total))",
            "peak + jnp.log(total / 2))",
            SINKS,
        ),
        ("log-sum-exp of padding from the sinks", "| ~queries.is_query[None]", "", SINKS),
        ("first tile read again and again", "nth = (i * tile_blocks", "nth = (0 * tile_blocks", TILES),
        ("last tile not read", "+ tile_blocks - 1) //", ") //", TILES),
        ("weights of earlier tiles not rescaled", "total = total * decay +", "total = total +", TILES),
        ("values of earlier tiles not rescaled", "out * decay[..., None] +", "out +", TILES),
        (
            "backward: sign of the sinks' gradient",
            "-jnp.sum(jnp.exp(sink",
            "jnp.sum(jnp.exp(sink",
            TILE_GRADIENTS,
        ),
        ("backward: scale left out", "slope * options.scale", "slope", TILE_GRADIENTS),
        (
            "backward: slope of the soft cap left out",
            "slope * options.scale",
            "options.scale",
            TILE_GRADIENTS,
        ),
        (
            "backward: sign of the log-sum-exp",
            "(axis=-1) - grad_lse)",
            "(axis=-1) + grad_lse)",
            TILE_GRADIENTS,
        ),
        (
            "backward: the first layer gets all gradients",
            "rows = get_at(saved.rows, rows, pool_grads[0].shape[0])",
            "pass",
            PREFIX_GRADIENTS,
        ),
        ("backward: only the last tile counts", "grad_q += jnp", "grad_q = jnp", TILE_GRADIENTS),
        (
            "backward: padding of the queries counts",
            "jnp.where(queries.is_query[:, :, None, None, None], q.astype(jnp.float32), 0)",
            "q.astype(jnp.float32)",
            "attention/test_gradients.py::test_padding_of_the_queries_changes_no_gradient",
        ),
    ),
    *in_module(
        "attention/attention",
        (
            "wrong head mapping",
            "num_kv_heads, shape[-2] // num_kv_heads, head_dim)",
            "shape[-2] // num_kv_heads, num_kv_heads, head_dim).swapaxes(2, 3)",
            GROUPED_HEADS,
        ),
    ),
]
