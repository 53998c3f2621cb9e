"""The mutations of `compress` and `attention_scores`."""

from tests.mutants.mutations import in_module

ROWS = "compression/test_compressed_rows.py"
KEPT = f"{ROWS}::test_each_layer_and_head_keeps_its_own_tokens[group]"
PUBLISHED = f"{ROWS}::test_each_layer_and_head_keeps_its_own_tokens[groups]"
BUDGETS = f"{ROWS}::test_groups_of_layers_keep_as_many_as_their_budgets_say"
PLAIN = f"{ROWS}::test_private_blocks_serve_again_and_the_others_go_back"
BEHIND = f"{ROWS}::test_what_was_compressed_is_dropped_from_behind_only"
WEIGHTS = "attention/test_attention_scores.py::test_weights_times_values_are_what_attention_gives"
MIX, ROTATED = f"{WEIGHTS}[mix]", f"{WEIGHTS}[int4-rotated]"

DERIVATIVES = "operations/test_derivatives.py"
SCORERS = "compression/test_token_scorer.py"
SAID = f"{SCORERS}::test_a_scorer_is_what_kvpress_says"

MUTATIONS = [
    *in_module(
        "compression/scorers",
        ("SnapKV pools over too few tokens", "= 64, 5, 4", "= 64, 3, 4", f"{SAID}[snapkv]"),
        ("H2O does not count who sees a token", "/ _float(jnp.maximum(num_seeing, 1))", "", f"{SAID}[h2o]"),
        ("KeyDiff keeps the common", "-jnp.sum(unit * anchor", "jnp.sum(unit * anchor", f"{SAID}[keydiff]"),
        ("Knorm keeps long keys", "-jnp.linalg.norm(tokens.k", "jnp.linalg.norm(tokens.k", f"{SAID}[knorm]"),
        ("the spread of queries to come does not count", "/ (2 * dim)", "* 0", f"{SAID}[expected_attention]"),
        (
            "queries to come stand where the last one did",
            "position + jnp.arange(num_future",
            "position + 0 * jnp.arange(num_future",
            f"{SCORERS}::test_queries_to_come_are_the_mean_and_spread_of_turned_ones",
        ),
        (
            "budgets of layers are equal",
            "(least - most) * share",
            "(least - most) / 2 * (share * 0 + 1)",
            f"{SCORERS}::test_budgets_fall_from_layer_to_layer_and_keep_the_average",
        ),
    ),
    *in_module(
        "compression/compress_rows",
        ("a row may keep nothing", "group.span.num_sink_tokens, 1)", "group.span.num_sink_tokens, 0)", KEPT),
        ("a row may keep more than it has", "(count > num_shown)", "(count > num_shown + 1)", KEPT),
        ("hidden tokens can be kept", "context_len - holes.num_hidden - ", "context_len - ", BEHIND),
        (
            "keeping everything is a compression",
            "(status == Status.OK) & ~is_same",
            "(status == Status.OK)",
            KEPT,
        ),
        (
            "layers of a group keep different numbers",
            "(count > num_shown) | is_uneven",
            "(count > num_shown)",
            BUDGETS,
        ),
        (
            "the text goes on where the row ends",
            "holes.num_dropped + context_len - plan.new_len",
            "holes.num_dropped",
            KEPT,
        ),
        (
            "kept tokens are taken for the text's first",
            "num_kept=plan.new_len - prefix_len",
            "num_kept=0 * prefix_len",
            PLAIN,
        ),
        (
            "blocks in front are published that are no prefix",
            "min_at(control.num_published, plan.rows, num_plain)",
            "control.num_published",
            PUBLISHED,
        ),
    ),
    *in_module(
        "compression/kept_tokens",
        ("the lowest scores are kept", "(is_less, -scores, places)", "(is_less, scores, places)", KEPT),
        ("tokens behind the row are kept", "(row_places < context_len[:, None]) &", "", KEPT),
        (
            "what is kept is not in order",
            "jnp.sort(jnp.where(places < num_keep, best, width), axis=-1)",
            "best",
            KEPT,
        ),
        (
            "all groups keep their tokens in front",
            "num_keep, first = num_keep[:, None, None, None], new_len - num_keep",
            "num_keep, first = num_keep[:, None, None, None], 0 * new_len",
            BUDGETS,
        ),
    ),
    *in_module(
        "compression/moved_columns",
        (
            "a shared block is written",
            "(block_pool.ref_counts(pool, entries) == 1)",
            "(block_pool.ref_counts(pool, entries) >= 1)",
            KEPT,
        ),
        ("a published block is written", "& ~block_pool.is_published(pool, entries)", "", PUBLISHED),
        ("private blocks are not used again", "(nth_own < num_written)", "False", KEPT),
        (
            "reserved blocks are forgotten",
            "columns + num_before - num_after",
            "columns + num_before + 99",
            PLAIN,
        ),
    ),
    *in_module(
        "blocks/token_moves",
        ("all heads keep what the first one does", "rows.shape[1] == 1", "rows.shape[1] > 0", KEPT),
        (
            "all layers keep what the first one does",
            "jnp.moveaxis(moves.sources, 1, 0), layer)",
            "jnp.moveaxis(moves.sources, 1, 0), 0 * layer)",
            KEPT,
        ),
    ),
    *in_module(
        "blocks/layer_moves",
        (
            "the first layer alone moves",
            "fori_loop(0, group.num_layers, move_layer",
            "fori_loop(0, 1, move_layer",
            KEPT,
        ),
        (
            "the first layer alone passes its gradient back",
            "fori_loop(0, group.num_layers, return_layer",
            "fori_loop(0, 1, return_layer",
            f"{DERIVATIVES}::test_what_moves_tokens_has_its_gradient[full]",
        ),
        (
            "moved tokens of any kind have a gradient",
            "require_gradient(group)",
            "pass",
            f"{DERIVATIVES}::test_quantised_layers_are_refused_by_their_name[grad]",
        ),
    ),
    *in_module(
        "blocks/span_moves",
        (
            "angles beyond the table reach gradients",
            "jnp.where(is_moved, moves.distance, 0)",
            "moves.distance",
            f"{DERIVATIVES}::test_what_moves_tokens_has_its_gradient[full]",
        ),
    ),
    *in_module(
        "attention/gather",
        (
            "what gather reads of any kind has a gradient",
            "pool = storage.refuse_derivatives(group, pool)",
            "",
            f"{DERIVATIVES}::test_quantised_layers_are_refused_by_their_name[grad]",
        ),
    ),
    *in_module(
        "core/holes",
        (
            "a group sees what it did not keep",
            "return is_dropped | (places < _spread(self.first, places))",
            "return is_dropped",
            BUDGETS,
        ),
    ),
    *in_module(
        "operations/rewrite",
        ("kept tokens are computed again", " | holes.is_kept(indices)", "", PLAIN),
    ),
    *in_module(
        "core/holes",
        (
            "text that compress went through is dropped again",
            "self.num_kept > 0, self.end + self.num_dropped, 0",
            "self.num_kept > 0, self.start, 0",
            BEHIND,
        ),
    ),
    *in_module(
        "compression/drop_tokens",
        ("kept tokens are dropped", "is_kept = start < before.kept_until", "is_kept = start < -1", BEHIND),
    ),
    *in_module(
        "operations/commit",
    ),
    *in_module(
        "operations/truncate",
        (
            "a row ends among kept tokens",
            "(new_len > holes.prefix_len)",
            "(new_len > holes.start)",
            PLAIN,
        ),
    ),
    *in_module(
        "attention/attention_scores",
        ("sinks take no part", "+ jnp.exp(sinks - peak)", "", MIX),
        (
            "weights of a window stand in the order read",
            "if group.span.keeps_all and",
            "if True or",
            MIX,
        ),
        (
            "the first queries are taken for the last",
            "num_before = jnp.maximum(plan.num_queries - num_last, 0)",
            "num_before = 0 * plan.num_queries",
            MIX,
        ),
        ("queries are not rotated as keys are", "q = group.kind.queries(q)", "", ROTATED),
        (
            "each tile is written where the first one is",
            "i * tile_len, axis=3",
            "0 * tile_len, axis=3",
            MIX,
        ),
    ),
    *in_module(
        "operations/rows",
        (
            "a compressed row publishes what is no prefix",
            "jnp.where(holes.is_plain, length, jnp.minimum(holes.prefix_len, length))",
            "length",
            PLAIN,
        ),
    ),
]
