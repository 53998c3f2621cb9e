"""The mutations of the operations on rows; those of `extend` and `commit` are in files of their own."""

from tests.mutants.mutations import (
    BRANCHES,
    FAILED_ROW,
    FIGURES,
    FORK,
    GATHER,
    MAX_LEN,
    RESERVED,
    ROW_FIELDS,
    in_module,
)

LISTS = "operations/test_eager_calls.py::test_lists_do_what_arrays_do[touch]"
SAME_PROGRAM = "operations/test_eager_calls.py::test_lists_of_other_lengths_are_the_same_program"
REPEATED = "operations/test_rows.py::test_repeated_ids_in_any_order"
USES = "operations/test_preempt.py::test_uses_are_counted_by_call_and_forgotten_with_the_row"
NOBODY = "operations/test_whole_calls.py::test_entries_that_name_nobody_repeat_nobody"
AS_BEFORE = "operations/test_whole_calls.py::test_entries_do_not_see_what_the_call_changes"
SMALLER = "operations/test_whole_calls.py::test_a_row_that_asks_for_less_gets_what_a_larger_one_left"

PREEMPT = "operations/test_preempt.py"
TARGET = f"{PREEMPT}::test_rows_are_freed_until_the_target_is_met"
ORDERS = f"{PREEMPT}::test_rows_in_the_order_of_each_policy"

FREED = "operations/test_cases.py::test_case_f_release_leaves_others_alone"
REORDER = "operations/test_sharing_cases.py::test_case_m_reorder_with_duplicates"
TRUNCATE = "operations/test_cases.py::test_case_n_truncate"
WINDOW_LOST = "operations/test_failures.py::test_window_lost_leaves_both_groups"
LOST_TWICE = "operations/test_windows.py::test_repeated_truncates_see_the_right_keys_or_fail[3]"
LONG_PROMPT = "operations/test_windows.py::test_allocate_of_a_prompt_longer_than_the_pool"
DONATED = "operations/test_transforms.py::test_donation_reuses_the_pools_and_reset_keeps_them"

CASES = "prefix/test_prefix_case_calls.py"
UNHELD_HITS = f"{CASES}::test_case_gg_hits_that_nobody_holds_are_needed_like_new_blocks[True]"
HITS_FAIL = "prefix/test_prefix_cases.py::test_case_r_revived_hits_are_not_counted_as_room"
EQUAL_PROMPTS = f"{CASES}::test_case_hh_two_equal_prompts_revive_their_hits_once"
QUEUE = f"{CASES}::test_case_ii_the_queue_after_two_rows_that_share_blocks"
LAST_FIRST = f"{CASES}::test_blocks_that_a_row_drops_are_queued_last_first"
HELD_HITS = "prefix/test_prefix_cases.py::test_case_q_a_hit_is_never_evicted_underneath_itself"
REFUSED_LENGTH = "prefix/test_prefix_scripts.py::test_lookup_finds_nothing_where_the_length_is_refused"
DECLINED = "prefix/test_prefix_scripts.py::test_reuse_can_be_declined"
PARTS = (
    "prefix/test_prefix_copies.py::"
    "test_a_row_holds_a_part_of_a_block_that_another_row_publishes[after it was published]"
)

ALLOCATE = in_module(
    "operations/allocate",
    (
        "an active row is allocated again",
        "(get_at(control.is_active, seq_ids), Status.SEQ_IN_USE)",
        "(get_at(control.is_active, seq_ids) & False, Status.SEQ_IN_USE)",
        f"{FAILED_ROW}[allocate]",
    ),
    ("prompt one token too long", "num_tokens > config.max", "num_tokens > 1 + config.max", MAX_LEN),
    (
        "a prompt longer than its tokens",
        "(num_tokens > most, Status.BAD_LENGTH)",
        "(num_tokens < 0, Status.BAD_LENGTH)",
        REFUSED_LENGTH,
    ),
    ("window reserves its whole prompt", "group.max_held_blocks -", "2**30 -", LONG_PROMPT),
    (
        "allocate takes one block too many",
        "(jnp.stack(needed) > available)",
        "(jnp.stack(needed) > available + 1)",
        f"{FAILED_ROW}[allocate]",
    ),
    ("hits that nobody holds are free of charge", "need += num_true(is_revived)", "pass", UNHELD_HITS),
    (
        "in shortage hits that nobody holds are free of charge",
        "free[g] - num_blocks[row] - num_revived",
        "free[g] - num_blocks[row]",
        UNHELD_HITS,
    ),
    (
        "in shortage every row revives its hits",
        "block_pool.has_no_owner(ref_counts[g], ids[row])",
        "block_pool.has_no_owner(pools[g].ref_count, ids[row])",
        EQUAL_PROMPTS,
    ),
    (
        "in shortage the last block is not handed out",
        "(jnp.stack(left) >= 0).all()",
        "(jnp.stack(left) > 0).all()",
        SMALLER,
    ),
    (
        "a failed prompt uses up blocks",
        "jnp.where(row_ok, jnp.stack(left), free)",
        "jnp.stack(left)",
        SMALLER,
    ),
    (
        "a failed prompt holds its hits",
        "jnp.where(row_ok, ids[row], counts.shape[0])",
        "ids[row]",
        HITS_FAIL,
    ),
    (
        "who was looked at in shortage stays an owner",
        "dataclasses.replace(pool, ref_count=add_at(ref_count, held, -1))",
        "dataclasses.replace(pool, ref_count=ref_count)",
        UNHELD_HITS,
    ),
    (
        "evicted before the hits are held",
        "index = prefix_index.note_hits(",
        "control = eviction.make_room(control, [n.sum(dtype=jnp.int32) for n in num_new], config)\n"
        "        index = prefix_index.note_hits(",
        HELD_HITS,
    ),
    (
        "reuse although it was not wanted",
        "found = jnp.where(reuse, found,",
        "found = jnp.where(True, found,",
        DECLINED,
    ),
    ("who declines reuse is asked", "asked = ok & prompts.reuse if", "asked = ok if", DECLINED),
    (
        "items behind the hit count as cached",
        "(end > first) & (end <= num_cached[:, None])",
        "(end > first)",
        "prefix/test_prefix_items.py::test_a_hit_never_ends_inside_an_item[tokens2-4-0]",
    ),
)

ROWS = in_module(
    "operations/rows",
    ("lists are padded with row 0", "constant_values=fill", "constant_values=0", LISTS),
    ("results of padding are handed out", "result = _first_rows(result, num_rows)", "pass", LISTS),
    ("lists are not padded", "        columns = _padded(", "        _padded(", SAME_PROGRAM),
    ("duplicate ids accepted", "(is_repeated, Status", "(is_repeated & False, Status", REPEATED),
    (
        "the last of equal ids wins",
        "order = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)",
        "order = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)[::-1]",
        REPEATED,
    ),
    (
        "who asks for nothing counts",
        "~(is_skipped | is_outside) & mask",
        "~(is_skipped | is_outside)",
        REPEATED,
    ),
    (
        "who names nobody counts",
        "~(is_skipped | is_outside) & mask",
        "(seq_ids >= 0) & mask",
        f"{NOBODY}[-1-6-fork]",
    ),
    ("negative ids not refused", "(column < 0) | (column >", "(column >", f"{FAILED_ROW}[free]"),
    (
        "sources that are skipped are not",
        "any_of([column == control.max_seqs for column in ids])",
        "seq_ids == control.max_seqs",
        f"{NOBODY}[8-1-fork]",
    ),
    (
        "idle rows are active",
        "is_idle = ~get_at(control.is_active, seq_ids)",
        "is_idle = seq_ids < 0",
        f"{FAILED_ROW}[free]",
    ),
    ("forks inherit no priority", '"context_len", "priority", ', '"context_len", ', ROW_FIELDS),
    (
        "forks share reserved blocks",
        "columns[None] < num_held[:, None]",
        "columns[None] >= 0",
        RESERVED,
    ),
)

USED = in_module(
    "core/state",
    (
        "clock advances on an empty call",
        "control.clock + (rows < control.max_seqs).any().astype(jnp.uint32)",
        "control.clock + jnp.uint32(1)",
        f"{FAILED_ROW}[touch]",
    ),
    (
        "rows are as old as before",
        "last_used=set_at(control.last_used, rows, clock)",
        "last_used=control.last_used",
        ROW_FIELDS,
    ),
    ("uses are not counted", "add(jnp.uint32(1)", "add(jnp.uint32(0)", USES),
)

FORKED = in_module(
    "operations/fork",
    (
        "fork without new owners",
        "block_pool.share(pool, jnp.where(ok[:, None],",
        "block_pool.share(pool, jnp.where(ok[:, None] & False,",
        FORK,
    ),
    (
        "a failed fork shares",
        "block_pool.share(pool, jnp.where(ok[:, None], ids, pool.num_blocks))",
        "block_pool.share(pool, ids)",
        f"{FAILED_ROW}[fork]",
    ),
    (
        "fork into an active row",
        "(get_at(control.is_active, dst_ids), Status",
        "(get_at(control.is_active, dst_ids) & False, Status",
        f"{FAILED_ROW}[fork]",
    ),
    (
        "fork of an idle row",
        "(~get_at(control.is_active, src_ids), Status",
        "(~get_at(control.is_active, src_ids) & False, Status",
        f"{FAILED_ROW}[fork]",
    ),
    ("forks stay idle", ", is_active=True)", ")", FORK),
)

ENDED = in_module(
    "operations/free",
    (
        "freed row keeps its length",
        "set_at(values, rows, 0) for name,",
        'set_at(values, rows, int(name == "context_len")) for name,',
        FREED,
    ),
    (
        "the first blocks are evicted first",
        "block_pool.release(pool, ids[:, ::-1])",
        "block_pool.release(pool, ids)",
        QUEUE,
    ),
    (
        "freed row keeps its blocks",
        "block_table=set_at(pool.block_table, rows, pool.num_blocks)",
        "block_table=pool.block_table",
        FREED,
    ),
)

TRUNCATED = in_module(
    "operations/truncate",
    (
        "truncate to more than there is",
        "(new_len > context_len,",
        "(new_len > 1 + context_len,",
        f"{FAILED_ROW}[truncate]",
    ),
    ("truncate to less than nothing", "(new_len < 0,", "(new_len < -1,", f"{FAILED_ROW}[truncate]"),
    ("rollback beyond max_rollback", "return is_beyond |", "return", WINDOW_LOST),
    (
        "second rollback finds nothing lost",
        "return is_beyond | ((column * group.block_size < new_len) & (entries == pool.num_blocks))",
        "return is_beyond",
        LOST_TWICE,
    ),
    (
        "the first blocks that a row drops are evicted first",
        "jnp.where(is_dropped, entries, pool.num_blocks)[:, ::-1]",
        "jnp.where(is_dropped, entries, pool.num_blocks)",
        LAST_FIRST,
    ),
    (
        "truncation leaves blocks published in the row",
        "num_published = jnp.minimum(get_at(control.num_published, rows), num_full)",
        "num_published = get_at(control.num_published, rows)",
        LAST_FIRST,
    ),
    (
        "a cut block is not counted",
        "jnp.where(has_published_tail, num_full + 1, num_published)",
        "num_published",
        PARTS,
    ),
)

REORDERED = in_module(
    "operations/reorder",
    (
        "reorder releases before it shares",
        "pool = block_pool.share(pool, jnp.where(moves[:, None], new_ids, pool.num_blocks))\n"
        "        pool = block_pool.release(pool, old_ids[:, ::-1])",
        "pool = block_pool.release(pool, old_ids[:, ::-1])\n"
        "        pool = block_pool.share(pool, jnp.where(moves[:, None], new_ids, pool.num_blocks))",
        REORDER,
    ),
    ("what a replaced row held is lost", "block_pool.release(pool, old_ids[:, ::-1])", "pool", REORDER),
    (
        "the first blocks of a replaced row are evicted first",
        "block_pool.release(pool, old_ids[:, ::-1])",
        "block_pool.release(pool, old_ids)",
        LAST_FIRST,
    ),
    ("rows move to themselves", " & (seq_ids != parent_ids)", "", AS_BEFORE),
    (
        "reorder of an idle parent",
        "(~get_at(control.is_active, parent_ids), Status",
        "(~get_at(control.is_active, parent_ids) & False, Status",
        f"{FAILED_ROW}[reorder]",
    ),
)

EDITS = [
    *in_module(
        "operations/touch",
        (
            "touch leaves no mark",
            "return mark_used(control, rows), status",
            "return control, status",
            ROW_FIELDS,
        ),
    ),
    *in_module(
        "operations/set_priority",
        (
            "priority not set",
            "set_at(control.priority, rows, priority)",
            "set_at(control.priority, rows, 0 * priority)",
            ROW_FIELDS,
        ),
    ),
]

PREEMPTED = in_module(
    "operations/preempt",
    (
        "rows go although the target is met",
        "block_pool.utilization(pool) > target",
        "block_pool.utilization(pool) >= target",
        f"{TARGET}[0.5-lru-dropped1]",
    ),
    (
        "the most recently used goes first",
        "keys.astype(jnp.int32), ~idle, ids)",
        "keys.astype(jnp.int32), idle, ids)",
        ORDERS,
    ),
    ("the shortest goes first", "return -rows.num_freed", "return rows.num_freed", ORDERS),
    (
        "the clock does not wrap",
        "idle = jnp.minimum(control.clock - control.last_used, jnp.uint32(_MAX)).astype(jnp.int32)",
        "idle = -(control.last_used >> 1).astype(jnp.int32)",
        f"{PREEMPT}::test_the_clock_may_wrap_around",
    ),
    (
        "the first order stays",
        "num_rows + 1, next_row(control)",
        "num_rows + 1, jax.tree.map(lambda x: x + num_rows * rows.shape[0], next_row(control))",
        f"{PREEMPT}::test_dropping_one_of_two_makes_the_other_worth_dropping",
    ),
)

FIGURED = in_module(
    "operations/stats",
    (
        "copies of published blocks not needed",
        " | block_pool.is_published(pool, tail)",
        "",
        PARTS,
    ),
    (
        "copies not needed",
        "+ copies_tail.astype(jnp.int32)",
        "",
        "operations/test_failures.py::test_a_copy_needs_a_block_too",
    ),
    ("own blocks count as shared", "ref_count > 1)", "ref_count > 0)", FIGURES),
    ("utilization of the emptiest group", "reduce(jnp.maximum,", "reduce(jnp.minimum,", FIGURES),
)

OTHERS = [
    *in_module(
        "operations/reset_prefix_cache",
        (
            "rows count what was forgotten",
            "num_published=jnp.zeros_like(control.num_published)",
            "num_published=control.num_published",
            "prefix/test_prefix_cases.py::test_case_y_reset_keeps_the_blocks_of_active_rows",
        ),
    ),
    *in_module(
        "operations/append",
        (
            "append writes the first layer's keys",
            "write(cache, layer, k[i],",
            "write(cache, layer, k[0],",
            BRANCHES,
        ),
    ),
    *in_module(
        "attention/gather",
        (
            "gather wraps ids",
            "get_at(row_len(control, group.kind), seq_id, 0)",
            "get_at(row_len(control, group.kind), seq_id % 3, 0)",
            GATHER,
        ),
    ),
    *in_module("core/donate", ("nothing donated", "jax.jit(fn, donate_argnums=0)", "jax.jit(fn)", DONATED)),
    *in_module(
        "core/init",
        ("reset forgets nothing", "return in_place_of(control, ", "return control\n    (", DONATED),
        (
            "heads that no mesh axis divides reach jax",
            "if num_heads % num_devices:",
            "if False:",
            "attention/test_sharding.py::test_heads_that_the_mesh_axis_does_not_divide_are_refused",
        ),
    ),
    *in_module(
        "operations/import_blocks",
        (
            "a differing block size is called another",
            'what |= {0: "layers", 1 + array.token_axis: "tokens a block"}',
            'what |= {0: "layers"}',
            "prefix/test_block_contents.py::test_what_differs_from_another_cache_is_said",
        ),
    ),
]

MUTATIONS = [
    *ALLOCATE,
    *ROWS,
    *USED,
    *FORKED,
    *ENDED,
    *TRUNCATED,
    *REORDERED,
    *EDITS,
    *PREEMPTED,
    *FIGURED,
    *OTHERS,
    *in_module(
        "operations/preempt",
        (
            "blocks of other rows come free",
            "config.hooks.blocks_of_rows(control, g)) == 1",
            "config.hooks.blocks_of_rows(control, g)) >= 1",
            f"{PREEMPT}::test_case_bb_a_row_whose_blocks_are_all_shared_frees_nothing",
        ),
    ),
]
