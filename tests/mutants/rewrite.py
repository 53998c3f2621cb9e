"""The mutations of `rewrite`, `drop` and streaming."""

from tests.mutants.mutations import in_module

TESTS = "operations/test_rewrite.py"
SHARED = f"{TESTS}::test_private_blocks_are_written_in_place_and_shared_ones_copied"
SCARCE = f"{TESTS}::test_scarce_blocks_go_in_the_order_of_the_entries"
BEHIND = f"{TESTS}::test_published_blocks_behind_a_copied_one_are_copied_too"
BEHIND_SHARED = f"{TESTS}::test_shared_blocks_behind_a_copied_one_are_copied_too"
CELL = "kinds/test_kinds.py::test_a_cell[full-rewrite]"
RUNS = "attention/test_rewritten_queries.py::test_a_backend_of_runs_is_given_each_query_as_a_row"
DROPPED = "compression/test_dropped_tokens.py"
ENDLESS = f"{DROPPED}::test_an_endless_text_in_fixed_memory[full]"
IN_WINDOWS = f"{DROPPED}::test_an_endless_text_in_fixed_memory[window]"
REFUSED = f"{DROPPED}::test_what_cannot_be_dropped"
CUT = f"{DROPPED}::test_a_row_is_cut_behind_what_it_dropped_or_in_front_of_it"
STREAM = "compression/test_generate_streaming.py"
PAST_THE_END = f"{STREAM}::test_a_text_goes_on_past_what_a_row_holds"
PREEMPT = "operations/test_preempt.py"
CUT_DOWN = f"{PREEMPT}::test_rows_drop_their_oldest_blocks_in_place_of_ending"
GO_ON = f"{PREEMPT}::test_rows_that_stream_go_on_dropping_behind_what_they_dropped"
LOST = "kinds/test_kinds.py::test_a_cell[window-rewrite]"

SINKS = "compression/test_moved_sinks.py"
NEAR = f"{SINKS}::test_sinks_are_as_near_as_if_nothing_was_dropped[full]"
PARTED = f"{SINKS}::test_rows_share_sinks_part_and_come_back"
NO_BLOCK = f"{SINKS}::test_without_a_block_for_the_sinks_nothing_changes"
MOVED = f"{SINKS}::test_what_a_row_with_moved_sinks_refuses"

MUTATIONS = [
    *in_module(
        "compression/drop_tokens",
        (
            "sinks move by what the row gave back",
            "plan.holes.num_hidden + plan.holes.num_dropped",
            "plan.holes.num_dropped",
            NEAR,
        ),
        (
            "sinks without blocks move",
            "status = jnp.where(wants & ~ok, ",
            "status = jnp.where(wants & ok & ~ok, ",
            NO_BLOCK,
        ),
        ("more sinks move than may", "num_sinks > max_sink_len", "num_sinks < 0", MOVED),
        (
            "sinks that were compressed move",
            "(plan.holes.num_kept > 0))",
            "(plan.holes.num_kept < 0))",
            MOVED,
        ),
    ),
    *in_module(
        "compression/sink_blocks",
    ),
    *in_module(
        "operations/rewrite",
    ),
    *in_module(
        "compression/compress_rows",
    ),
    *in_module(
        "operations/scrub",
    ),
    *in_module(
        "operations/rewrite",
        ("a shared block is written anew", "block_pool.ref_counts(pool, blocks) > 1", "False", SHARED),
        (
            "a published block is written anew",
            "is_published(pool, blocks) |",
            "is_published(pool, blocks) & False |",
            BEHIND,
        ),
        (
            "children of a copied block stay published",
            "is_kept & (lax",
            "False & (lax",
            BEHIND,
        ),
        (
            "children of a copied block stay shared",
            "is_kept & (lax",
            "block_pool.is_published(pool, blocks) & (lax",
            BEHIND_SHARED,
        ),
        (
            "a private block is copied before it is written anew",
            "_pool.ref_counts(pool, blocks) > 1",
            "_pool.ref_counts(pool, blocks) > 0",
            SHARED,
        ),
        ("a repeated index is written anew", "indices[:, 1:] <= indices", "indices[:, 1:] < indices", CELL),
        (
            "an index outside is written anew",
            "(indices >= context_len[:, None])",
            "(indices > context_len[:, None])",
            CELL,
        ),
        (
            "a token whose window left is written anew",
            "<= indices) & (entries",
            "< indices - 99) & (entries",
            LOST,
        ),
        (
            "tokens that are written anew are taken for a run",
            "is_contiguous=False",
            "is_contiguous=True",
            CELL,
        ),
        (
            "a row that rewrites keeps its count of published blocks",
            "min_at(control.num_published, rows, first_copied)",
            "control.num_published",
            BEHIND,
        ),
    ),
    *in_module(
        "attention/attention_plan",
        ("queries with gaps are handed in as a run", "if plan.positions is None or", "if True or", RUNS),
        (
            "padding reads what nobody wrote",
            "jnp.where(is_query, positions, -1)",
            "positions",
            CELL,
        ),
    ),
    *in_module(
        "attention/tiles",
        ("queries with gaps see as a run does", "if plan.positions is not None:", "if False:", CELL),
    ),
    *in_module(
        "compression/drop_tokens",
        (
            "a drop is not released",
            "where(is_gone, entries, pool.num_blocks)",
            "where(is_gone & False, entries, pool.num_blocks)",
            ENDLESS,
        ),
        (
            "a drop frees blocks that hold other tokens",
            "quotient(first + unit - 1, unit)",
            "quotient(first, unit)",
            ENDLESS,
        ),
        ("a drop among the sinks", "start < num_sinks", "start < 0", REFUSED),
        (
            "a drop apart from the first",
            "is_apart = ~is_plain & (",
            "is_apart = ~is_plain & is_plain & (",
            REFUSED,
        ),
        (
            "a drop leaves the row as long as it was",
            "plan.context_len - plan.num_gone)",
            "plan.context_len)",
            ENDLESS,
        ),
    ),
    *in_module(
        "operations/rows",
        ("rows that rewrite take no block in turn", "jnp.where(fits, left, free)", "free", SCARCE),
    ),
    *in_module(
        "core/holes",
        (
            "a token behind a drop is taken for an earlier one",
            "places >= _spread(self.start, places), num_dropped, 0",
            "places < 0, num_dropped, 0",
            IN_WINDOWS,
        ),
        (
            "the last token of a drop is seen",
            "(places < _spread(self.end, places))",
            "(places < _spread(self.end, places) - 1)",
            ENDLESS,
        ),
    ),
    *in_module(
        "operations/truncate",
        (
            "a row that is cut in front of its drop remembers it",
            "kept.forgotten(new_len <= kept.prefix_len)",
            "kept",
            CUT,
        ),
    ),
    *in_module(
        "attention/tiles",
        ("a drop is seen", "& ~plan.holes.is_hidden(key_pos)", "", ENDLESS),
    ),
    *in_module(
        "operations/extend",
        (
            "positions behind a drop are places",
            "(positions + shift).reshape",
            "(positions + 0 * shift).reshape",
            ENDLESS,
        ),
    ),
    *in_module(
        "attention/tiles",
        (
            "the tokens of a prompt see what the first one of their call sees",
            "seen & plan.within.sees(first, last, in_text)",
            "seen",
            PAST_THE_END,
        ),
    ),
    *in_module(
        "layers/span",
        (
            "an exported step sees less",
            'else Span(**values["span"])',
            "else Span(window=1)",
            f"{STREAM}::test_a_step_that_streams_is_exported",
        ),
    ),
    *in_module(
        "compression/streaming",
        (
            "rows that stream are thought to hold less",
            "unit - 1 + self.window - 1",
            "self.window - 1",
            f"{STREAM}::test_what_cannot_stream_is_refused",
        ),
    ),
    *in_module(
        "compression/streaming",
        ("a token sees one token too many", "text_len + 1 - self", "text_len - self", PAST_THE_END),
        (
            "sinks are dropped",
            "start = jnp.full_like(rows, self.num_sink_tokens)",
            "start = jnp.full_like(rows, self.num_sink_tokens - 1)",
            PAST_THE_END,
        ),
        (
            "each length of a text is a program",
            "1 << (max(map(len, prompts), default=0) + max_new_tokens - 1).bit_length()",
            "max(map(len, prompts), default=0) + max_new_tokens",
            f"{STREAM}::test_other_texts_compile_nothing",
        ),
    ),
    *in_module(
        "decoding/prefill",
        (
            "a piece behind dropped tokens begins too late",
            "place -= shift[:, 0]",
            "pass",
            f"{STREAM}::test_a_piece_behind_dropped_tokens_tells_its_place_in_the_row",
        ),
    ),
    *in_module(
        "decoding/room",
        (
            "rows stream without blocks for all that they may come to",
            "num_needed = sum(_most_held(group, int(rows.max_len[row]), held_len) for row in rows.ids)",
            "num_needed = 0",
            f"{STREAM}::test_samples_stream_from_the_prompt_that_they_share",
        ),
    ),
    *in_module(
        "operations/preempt",
    ),
    *in_module(
        "compression/sinks",
        (
            "sinks drift",
            "jnp.where(is_first, read, jnp.where(is_sink, kept, pool.num_blocks))",
            "read",
            NEAR,
        ),
        (
            "shared sinks are rotated in place",
            "(block_pool.ref_counts(pool, read) != 1)",
            "(read < 0)",
            PARTED,
        ),
        (
            "what is behind the sinks moves along",
            "jnp.where(moves, distance[:, None], 0)",
            "distance[:, None] + 0 * places",
            NEAR,
        ),
        (
            "tokens behind the sinks come from the original block",
            "jnp.where(moves, original, jnp.where(",
            "jnp.where(moves | True, original, jnp.where(",
            f"{SINKS}::test_tokens_that_came_into_the_block_of_the_sinks_stay",
        ),
    ),
    *in_module(
        "compression/dropping",
        (
            "a row keeps its own original sinks beside those it inherits",
            "return block_pool.release(pool, old[:, ::-1]), set_at",
            "return pool, set_at",
            PARTED,
        ),
        (
            "original sinks that are no longer ones are held",
            "jnp.where(goes, held, pool.num_blocks)[:, ::-1]",
            "jnp.where(goes & False, held, pool.num_blocks)[:, ::-1]",
            NEAR,
        ),
        (
            "a cut row keeps its rotated sinks",
            "jnp.where(is_back, original, rotated)",
            "rotated",
            PARTED,
        ),
        (
            "moved sinks are computed again",
            "(places < starts[:, None])",
            "(places < 0)",
            MOVED,
        ),
    ),
    *in_module(
        "compression/compress_rows",
        (
            "moved sinks are compressed",
            "is_bad |= reads_rotated(control, seq_ids) & ~is_same",
            "",
            MOVED,
        ),
    ),
    *in_module(
        "core/extras",
        (
            "original sinks are not scrubbed",
            "if held.is_of_rows]",
            "if False]",
            PARTED,
        ),
    ),
    *in_module(
        "operations/scrub",
        (
            "original sinks of another namespace are scrubbed",
            "is_kept.at[of_others].set(True",
            "is_kept.at[of_others].set(False",
            f"{SINKS}::test_a_namespace_is_scrubbed_and_sinks_of_another_stay",
        ),
        (
            "what is behind original sinks is scrubbed",
            "max_at(num_tokens, held.block_ids, block_size)",
            "max_at(num_tokens, held.block_ids, 0)",
            f"{SINKS}::test_a_namespace_is_scrubbed_and_sinks_of_another_stay",
        ),
    ),
    *in_module(
        "operations/preempt",
        (
            "original sinks do not come free",
            "config.hooks.blocks_of_rows(control, g)) == 1",
            "pool.block_table) == 1",
            f"{SINKS}::test_the_original_sinks_count_among_the_blocks_that_a_row_frees",
        ),
    ),
    *in_module(
        "compression/drop_blocks",
        (
            "rows drop more than is needed",
            "is_enough.any(axis=1), first",
            "False, first",
            CUT_DOWN,
        ),
        (
            "rows drop blocks with tokens of the window",
            "control.context_len - self.window, unit",
            "control.context_len - self.window + unit - 1, unit",
            CUT_DOWN,
        ),
        (
            "rows drop the block of their sinks",
            "ceil_div(streaming.num_sink_tokens, unit) * unit",
            "streaming.num_sink_tokens // unit * unit",
            CUT_DOWN,
        ),
        (
            "rows drop in front of what they dropped before",
            "jnp.where(holes.is_plain, ceil_div",
            "jnp.where(holes.is_plain | True, ceil_div",
            GO_ON,
        ),
        (
            "rows drop blocks that others hold too",
            "pool.block_table) == 1",
            "pool.block_table) >= 1",
            GO_ON,
        ),
        (
            "the shortest rows drop first",
            'policy: str = "longest"',
            'policy: str = "lru"',
            CUT_DOWN,
        ),
    ),
]
