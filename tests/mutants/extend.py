"""The mutations of `extend`: its plan, and the decision where blocks are short."""

from tests.mutants.mutations import (
    ALL_AT_ONCE,
    BOUNDED,
    BRANCHES,
    COPY_NEEDS_BLOCK,
    FAILED_ROW,
    MAX_LEN,
    PACKED,
    RESERVED,
    ROLLBACK,
    SPARE_BLOCK,
    WINDOWS,
    in_module,
)

PACKED_END = "operations/test_failures.py::test_packed_rows_past_the_end_fail"
NO_TOKENS = "operations/test_whole_calls.py::test_entries_without_tokens_name_nobody[extend]"
ONE_GROUP = "operations/test_failures.py::test_failure_in_one_group_leaves_both[5-40]"
PARTS = (
    "prefix/test_prefix_copies.py::"
    "test_a_row_holds_a_part_of_a_block_that_another_row_publishes[before it is published]"
)
OWN_TOKENS = (
    "prefix/test_prefix_cases.py::test_case_dd_a_published_block_is_copied_before_it_is_written[False]"
)

CALL = "operations/test_blocks_of_a_call.py"
HOW_MANY = f"{CALL}::test_how_many_writers_copy"
SHORT = f"{CALL}::test_who_copies_when_blocks_are_short"
OTHERS_COPY = f"{CALL}::test_copies_of_one_block_leave_no_other_block_to_one_owner"
ORIGINAL = f"{CALL}::test_an_original_without_owner_can_be_taken_from_the_next_call_on"
ORDER = f"{CALL}::test_originals_stand_in_the_queue_in_the_order_of_the_entries"
MAKE_ROOM = f"{CALL}::test_cached_blocks_make_room_for_all_rows_of_a_call"
LEFT = f"{CALL}::test_blocks_that_left_the_own_or_an_earlier_window_count"
NOT_LEFT = f"{CALL}::test_blocks_of_the_window_of_an_entry_that_failed_do_not_count"
LAST_OWNER = f"{CALL}::test_a_shared_block_leaves_with_its_last_owner"
STILL_OWNED = f"{CALL}::test_what_windows_give_back_in_the_call_still_counts_as_owned[False]"

BEYOND = f"{WINDOWS}::test_truncate_beyond_the_rollback_is_window_lost"
SINKS_STAY = f"{WINDOWS}::test_sink_tokens_stay"

EXTEND = in_module(
    "operations/extend",
    (
        "failed row advances",
        "mark_used(control, rows, context_len=new_len)",
        "mark_used(control, plan.seq_ids, context_len=context_len + plan.num_new)",
        f"{FAILED_ROW}[extend]",
    ),
    (
        "failed rows have queries",
        "query_len = jnp.where(plan.grows, plan.num_new, 0)",
        "query_len = plan.num_new",
        ALL_AT_ONCE,
    ),
    ("padding has slots", "jnp.where(is_token, slot,", "jnp.where(True, slot,", ALL_AT_ONCE),
    (
        "blocks behind the window stay",
        "jnp.where(plan.grows[:, None], planned.leaving",
        "jnp.where(False, planned.leaving",
        LEFT,
    ),
    (
        "failed rows give back what left their windows",
        "jnp.where(plan.grows[:, None], planned.leaving",
        "jnp.where(True, planned.leaving",
        NOT_LEFT,
    ),
    (
        "rows keep the columns that left their windows",
        "table = set_at(pool.block_table, (rows, planned.leaving_columns), pool.num_blocks)",
        "table = pool.block_table",
        LEFT,
    ),
    (
        "nothing is evicted for the rows",
        "control = eviction.make_room(control, needs, config)",
        "",
        MAKE_ROOM,
    ),
    (
        "a copied last block is taken for every token",
        "tokens.spread(copies_tail, False) & (tokens.offset == 0)",
        "tokens.spread(copies_tail, False)",
        COPY_NEEDS_BLOCK,
    ),
    (
        "a copied last block is not taken",
        "is_new |= tokens.spread(copies_tail, False) & (tokens.offset == 0)",
        "",
        BRANCHES,
    ),
    ("blocks are taken for failed rows", "& tokens.spread(plan.grows, False)", "", f"{FAILED_ROW}[extend]"),
    (
        "copies read where they write",
        "src=set_at(nowhere, place, tails)",
        "src=set_at(nowhere, place, tokens.first(new))",
        BRANCHES,
    ),
    (
        "copies in each other's places",
        "place = jnp.where(copies_tail, rank, rank.shape[0])",
        "place = jnp.where(copies_tail, 0 * rank, rank.shape[0])",
        BRANCHES,
    ),
    (
        "originals keep their owners",
        "(block_pool.release(pool, tails), block_table",
        "(pool, block_table",
        BRANCHES,
    ),
    (
        "originals are released by the last row first",
        "block_pool.release(pool, tails), block_table",
        "block_pool.release(pool, tails[::-1]), block_table",
        ORDER,
    ),
    ("copies are not counted", "{Counter.COPIES: num_copies}", "{Counter.COPIES: 0 * num_copies}", BRANCHES),
    (
        "copied blocks are published in the row",
        "num_published = min_at(control.num_published, copiers, num_full)",
        "num_published = control.num_published",
        PARTS,
    ),
    (
        "tokens of a copied block forgotten",
        "set_at(block_tokens, copied.dst, originals)",
        "block_tokens",
        OWN_TOKENS,
    ),
    (
        "tokens not recorded",
        "set_at(block_tokens, places, tokens)",
        "set_at(block_tokens, places, 0 * tokens)",
        OWN_TOKENS,
    ),
)

NEW_TOKENS = in_module(
    "operations/extend_plan",
    (
        "packed rows have the next row's last block",
        "per_token, self.starts[:-1]",
        "per_token, self.starts[1:]",
        "operations/test_failures.py::test_the_other_rows_of_the_call_proceed[extend_packed]",
    ),
    (
        "the last block is the last token's",
        "reshape(self.shape)[:, 0]",
        "reshape(self.shape)[:, -1]",
        RESERVED,
    ),
    ("packed offsets count from the call's start", "order - starts[row]", "order", PACKED),
    (
        "packed rows count the blocks of those before them",
        "jnp.diff(get_at(before, self.starts))",
        "get_at(before, self.starts[1:])",
        "operations/test_whole_calls.py::test_all_rows_grow_where_there_are_blocks_for_all[extend_packed]",
    ),
)

WHO_MAY_GROW = in_module(
    "operations/extend_plan",
    ("who asks for nothing names a row", "mask=num_new != 0", "mask=True", NO_TOKENS),
    ("who asks for less than nothing names nobody", "mask=num_new != 0", "mask=num_new > 0", NO_TOKENS),
    ("idle rows grow", "(num_new > 0) & ~is_active,", "(num_new > 0) & False,", f"{FAILED_ROW}[extend]"),
    (
        "negative numbers of tokens are none",
        "(num_new < 0, Status.BAD_LENGTH)",
        "(num_new < 0, Status.OK)",
        f"{FAILED_ROW}[extend]",
    ),
    (
        "one token too many",
        "(num_new > config.max_seq_len - context_len)",
        "(num_new > config.max_seq_len - context_len + 1)",
        MAX_LEN,
    ),
    ("more tokens than the call has room for", "(num_new > max_new) |", "", f"{FAILED_ROW}[extend]"),
    ("packed tokens past the end", "| ends_outside |", "|", PACKED_END),
    (
        "rows without blocks are OK",
        "jnp.where(plan.grows & ~grows,",
        "jnp.where(plan.grows & False,",
        f"{FAILED_ROW}[extend]",
    ),
    ("reserved blocks not used", "== 0) & (entries == nowhere)", "== 0)", RESERVED),
)

COPIES = in_module(
    "operations/extend_plan",
    (
        "write into a shared block",
        "has_tail & (is_published | ~is_last_owner)",
        "has_tail & is_published",
        BRANCHES,
    ),
    (
        "the last owner copies too",
        "has_tail & (is_published | ~is_last_owner)",
        "has_tail",
        f"{HOW_MANY}[False]",
    ),
    (
        "a published block written by its owner",
        "has_tail & (is_published | ~is_last_owner)",
        "has_tail & ~is_last_owner",
        f"{HOW_MANY}[True]",
    ),
    ("writers that were counted are gone", "ref_count = add_at(ref_count, tail, 1)", "", BRANCHES),
    (
        "copy needs no block",
        "return self.num_blocks + self.copies_tail.astype(jnp.int32)",
        "return self.num_blocks",
        SPARE_BLOCK,
    ),
)

SHORTAGE = in_module(
    "operations/extend_plan",
    (
        "one block too many promised",
        "(required_blocks(plan) > available)",
        "(required_blocks(plan) > available + 1)",
        f"{FAILED_ROW}[extend]",
    ),
    (
        "short only if every group is",
        "(required_blocks(plan) > available).any()",
        "(required_blocks(plan) > available).all()",
        ONE_GROUP,
    ),
    (
        "blocks of later windows count",
        "jnp.max(jnp.cumsum(group.need - group.num_back), initial=0)",
        "jnp.sum(group.need - group.num_back, dtype=jnp.int32)",
        LEFT,
    ),
    ("last block not handed out", "(jnp.stack(left) >= 0).all()", "(jnp.stack(left) > 0).all()", SHORT),
    (
        "blocks in one group suffice",
        "(jnp.stack(left) >= 0).all()",
        "(jnp.stack(left) >= 0).any()",
        ONE_GROUP,
    ),
    ("in shortage a copy needs no block", " - copies[-1].astype(jnp.int32)", "", SPARE_BLOCK),
    ("failed row uses up blocks", "jnp.where(row_grows, jnp.stack(left), free)", "jnp.stack(left)", SHORT),
    ("failed writer owns no longer", "set(jnp.stack(copies) & row_grows)", "set(jnp.stack(copies))", SHORT),
    (
        "copies of the proposal count in shortage",
        "jnp.stack([group.copies_tail & ~is_short for",
        "jnp.stack([group.copies_tail for",
        SHORT,
    ),
    (
        "copies of other blocks count",
        "num_true(copies_tail[g] & (tail == tail[row]))",
        "num_true(copies_tail[g])",
        OTHERS_COPY,
    ),
    (
        "in shortage a published block is written by its owner",
        "(group.is_tail_published[row] | is_shared)",
        "is_shared",
        ORIGINAL,
    ),
    (
        "what windows give back has no owner at once",
        "num_owners[row] - num_copied > 1",
        "get_at(ref_counts[g], tail[row], 0) - num_copied > 1",
        STILL_OWNED,
    ),
    (
        "in shortage nothing leaves a window",
        "num_back = num_true(get_at(ref_counts[g], group.leaving[row], 0) == 1)",
        "num_back = jnp.int32(0)",
        LAST_OWNER,
    ),
    (
        "a shared block leaves with its first owner",
        "group.leaving[row], 0) == 1)",
        "group.leaving[row], 0) >= 1)",
        LAST_OWNER,
    ),
    (
        "a failed row lets go of its window",
        "jnp.where(row_grows, group.leaving[row], counts.shape[0])",
        "group.leaving[row]",
        NOT_LEFT,
    ),
    (
        "owners are given back although nobody let go",
        "jnp.where((grows & is_short)[:, None], group.leaving",
        "jnp.where(grows[:, None], group.leaving",
        f"{BOUNDED}[window 7, 5 sinks]",
    ),
)

WINDOW = in_module(
    "operations/extend_plan",
    ("window drops a column too many", "group.max_rollback)", "group.max_rollback) + 1", ROLLBACK),
    (
        "window drops a column too few",
        "group.max_rollback)",
        "group.max_rollback) - 1",
        f"{BOUNDED}[window 7, 5 sinks]",
    ),
    ("max_rollback ignored", ", group.max_rollback)", ")", BEYOND),
    ("sinks leave the window", "columns >= group.num_sink_blocks", "columns >= 0", SINKS_STAY),
    (
        "owners of what leaves a window are gone",
        "ref_count = add_at(ref_count, leaving, 1)",
        "",
        f"{BOUNDED}[window 7, 5 sinks]",
    ),
)

MUTATIONS = [*EXTEND, *NEW_TOKENS, *WHO_MAY_GROW, *COPIES, *SHORTAGE, *WINDOW]
