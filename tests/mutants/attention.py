"""Mutations of attention by XLA and of the pools that it reads; see `mutations.py`."""

from tests.mutants.mutations import BRANCHES, DENSE, GROUPED_HEADS, PADDING, in_module

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

MANY_COPIES = "operations/test_blocks_of_a_call.py::test_more_rows_copy_than_a_trip_has_places"

MUTATIONS = [
    *in_module(
        "attention/write",
        ("keys and values swapped on write", '{"k": k, "v": v}', '{"k": v, "v": k}', BRANCHES),
    ),
    *in_module(
        "blocks/storage",
        (
            "block id shifted on write",
            "quotient(slots, ",
            "1 + quotient(slots, ",
            BRANCHES,
        ),
        (
            "offset shifted on write",
            "remainder(slots, ",
            "remainder(1 + slots, ",
            BRANCHES,
        ),
        ("layer left out of a block's place", "layer * num_blocks + block_ids", "block_ids", HALVES),
        (
            "nowhere mapped after the layer shift",
            "block_ids < num_blocks, layer *",
            "block_ids < num_rows, layer *",
            PADDING,
        ),
        ("copy without the contents", ".set(get_at(x, rows)", ".set(get_at(x, new_rows)", BRANCHES),
        (
            "copy of the first layer only",
            "jnp.arange(group.num_layers, dtype=jnp.int32)[:, None]",
            "jnp.arange(1, dtype=jnp.int32)[:, None]",
            BRANCHES,
        ),
        (
            "every trip copies the first blocks",
            "nth = trip * _COPIES",
            "nth = 0 * trip * _COPIES",
            MANY_COPIES,
        ),
        (
            "backward: overwritten slots pass gradients",
            "kept[name] = grad.at[places].set(jnp.zeros_like(values), mode",
            "kept[name] = grad.at[places].set(values, mode",
            OVERWRITTEN,
        ),
        (
            "backward: overwritten blocks pass gradients",
            '.set(jnp.zeros_like(moved), mode="drop")',
            '.set(moved, mode="drop")',
            COPIED,
        ),
        (
            "backward: copies return no gradient",
            "return grad.at[rows].add(moved,",
            "return grad.at[rows].add(0 * moved,",
            PREFIX_GRADIENTS,
        ),
    ),
    *in_module(
        "attention/tiles",
        (
            "sink columns not read",
            "jnp.where(nth < group.num_sink_blocks, nth,",
            "jnp.where(False, nth,",
            SINKS,
        ),
        (
            "what lies behind the row's last token is read",
            "is_held = sees(first, last, key_pos[:, :, None]) &",
            "is_held =",
            PADDED,
        ),
        (
            "scale left out",
            'product("hrmd,hrnd->hrmn", q, read.k) * scale',
            'product("hrmd,hrnd->hrmn", q, read.k)',
            PADDED,
        ),
        ("soft cap left out", "if soft_cap is None:", "if True:", GROUPED_HEADS),
        ("first tile read again and again", "nth = (i * tile_blocks", "nth = (0 * tile_blocks", TILES),
        ("last tile not read", "+ tile_blocks - 1) //", ") //", TILES),
    ),
    *in_module(
        "attention/xla",
        (
            "NaN of unowned slots read",
            "        v = jnp.where(tile.is_held,",
            "        v = jnp.where(True,",
            PADDED,
        ),
        (
            "a layer that does not exist is read",
            "is_layer = (layer >= 0) & (layer < group.num_layers)",
            "is_layer = layer == layer",
            "operations/test_transforms.py::test_a_traced_layer_that_does_not_exist_writes_nowhere_and_reads_nan",
        ),
        ("sink logits left out", "peak = peak * 0 + sink_logits[None, None]", "pass", SINKS),
        (
            "log-sum-exp of half the weights",
            "peak + jnp.log(total))",
            "peak + jnp.log(total / 2))",
            SINKS,
        ),
        (
            "log-sum-exp of padding from the sinks",
            "is_empty = (peak <= MASKED) | ~is_query",
            "is_empty = peak <= MASKED",
            SINKS,
        ),
        ("weights of earlier tiles not rescaled", "total = total * decay +", "total = total +", TILES),
        ("values of earlier tiles not rescaled", "out = out * decay[..., None]", "pass", TILES),
        (
            "backward: sign of the sinks' gradient",
            "grad_sinks = -jnp.sum(",
            "grad_sinks = jnp.sum(",
            TILE_GRADIENTS,
        ),
        ("backward: scale left out", "grad_logits * slope * scale", "grad_logits * slope", TILE_GRADIENTS),
        (
            "backward: slope of the soft cap left out",
            "grad_logits * slope * scale",
            "grad_logits * scale",
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
            "rows = get_at(saved.rows, rows,",
            "_ = get_at(saved.rows, rows,",
            PREFIX_GRADIENTS,
        ),
        ("backward: only the last tile counts", "grad_q += product", "grad_q = product", TILE_GRADIENTS),
        (
            "backward: padding of the queries counts",
            "jnp.where(query_mask(plan, q.shape)[..., None], q, 0)",
            "q",
            "attention/test_gradients.py::test_padding_of_the_queries_changes_no_gradient",
        ),
    ),
    *in_module(
        "attention/attention",
        (
            "wrong head mapping",
            "grouped = q.reshape(-1, num_queries,",
            "grouped = q[..., ::-1, :].reshape(-1, num_queries,",
            GROUPED_HEADS,
        ),
    ),
]
