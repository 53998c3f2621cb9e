"""The mutations that `mutants.py` tries, each with the quickest test that ought to notice it.

A mutation changes behaviour: what only costs time, or what another line makes up for, proves nothing here.
Its old text is short, so that edits around it leave it valid, and occurs once in its file.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One text of the library, replaced.

    Attributes:
      name: What the mutant does wrong.
      file: From the repository's root.
      old: Occurs exactly once in the file.
      new: Takes its place.
      test: Id below `tests/` of the test that must fail; with several parameters, one must.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


def in_module(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one module: (name, old, new, test)."""
    return [Mutation(name, f"kvcache_jax/{module}.py", *rest) for name, *rest in mutations]


LISTS = "operations/test_eager_calls.py::test_lists_do_what_arrays_do[touch-3]"
SAME_PROGRAM = "operations/test_eager_calls.py::test_lists_of_other_lengths_are_the_same_program"
REUSED = "operations/test_eager_calls.py::test_callers_may_overwrite_their_arrays_after_the_call"
BUDGET = "operations/test_cases.py::test_case_a_sizes_from_a_memory_budget"
NOTHING_TO_DO = "operations/test_cases.py::test_case_e_nothing_to_do_and_block_boundaries"
PADDING = "operations/test_cases.py::test_case_g_padding_and_idle_rows_write_nowhere"
MAX_LEN = "operations/test_cases.py::test_case_h_row_at_max_seq_len[100]"
FORK = "operations/test_sharing_cases.py::test_case_i_fork_takes_no_block"
UPDATES = "core/test_single_kernel.py::test_updates_skip_what_is_outside"
COUNTED = "core/test_single_kernel.py::test_the_last_owner"
PER_TRIP = "core/test_single_kernel.py::test_several_entries_per_trip"
SEVERAL = "core/test_single_kernel.py::test_updates_of_several_arrays_skip_each_their_own"
REPEATED = "operations/test_rows.py::test_repeated_ids_in_any_order"
READS = "core/test_single_kernel.py::test_reads_outside_give_the_fill"
ON_ACCELERATORS = "core/test_single_kernel.py::test_accelerators_get_scatters_and_no_mark"
OTHER_POLICIES = "core/test_single_kernel.py::test_other_policies_are_not_in_a_kernel"
UNREAD = "core/test_single_kernel.py::test_parameters_that_nothing_reads"
RESERVED = "operations/test_sharing_cases.py::test_case_i_reserved_blocks_stay_with_the_source"
BRANCHES = "operations/test_sharing_cases.py::test_case_k_three_branches_of_one_row"
REORDER = "operations/test_sharing_cases.py::test_case_m_reorder_with_duplicates"
TRUNCATE = "operations/test_cases.py::test_case_n_truncate"
SPARE_BLOCK = "operations/test_sharing_cases.py::test_case_ee_three_writers_and_one_spare_block[3]"
FREED = "operations/test_cases.py::test_case_f_release_leaves_others_alone"

FAILED_ROW = "operations/test_failures.py::test_a_failed_row_changes_nothing"
REPEATED_ROW = "operations/test_failures.py::test_successive_rows_of_one_call"
OTHER_ROWS = "operations/test_failures.py::test_the_other_rows_of_the_call_proceed[extend]"
PACKED_END = "operations/test_failures.py::test_packed_rows_past_the_end_fail"
COPY_NEEDS_BLOCK = "operations/test_failures.py::test_a_copy_needs_a_block_too"
WIDE_INTEGERS = (
    "operations/test_failures.py::test_integers_beyond_32_bits_never_wrap_into_a_valid_one[4294967300]"
)
WINDOW_LOST = "operations/test_failures.py::test_window_lost_leaves_both_groups"

DENSE = "attention/test_attention_blind.py::test_attention_against_dense_float64"
PACKED = f"{DENSE}[float32-2-8-4-7-None-False-None-None-True-True]"
GROUPED_HEADS = f"{DENSE}[float32-8-8-16-3-None-False-2.5-0.3-True-False]"

BOUNDED = "operations/test_windows.py::test_long_prompt_and_long_decode_in_a_bounded_pool"
LONG_PROMPT = "operations/test_windows.py::test_allocate_of_a_prompt_longer_than_the_pool"
ROLLBACK = "operations/test_windows.py::test_truncate_within_the_rollback_then_decode[4-0]"
LOST_TWICE = "operations/test_windows.py::test_repeated_truncates_see_the_right_keys_or_fail[3]"
WINDOW_FORKS = "operations/test_windows.py::test_forks_of_windowed_rows[4-0]"
COPIED_LATER = "operations/test_windows.py::test_a_block_that_is_copied_is_not_free_for_an_earlier_copy"
BEYOND = "operations/test_windows.py::test_truncate_beyond_the_rollback_is_window_lost"


VMAP = "core/test_static_errors.py::test_batched_queries_need_a_batched_cache"

WIDE_TOKENS = "core/test_static_errors.py::test_token_ids_that_do_not_fit_are_refused"


GATHER = "attention/test_gather.py::test_gather_is_zero_where_no_token_is"
ROW_FIELDS = "operations/test_rows.py::test_priority_namespace_and_recency_follow_the_rows"
FIGURES = "operations/test_stats.py::test_figures"
DONATED = "operations/test_transforms.py::test_donation_reuses_the_pools_and_reset_keeps_them"
INVARIANTS = "inspect/test_check_invariants.py::test_broken_rows_and_blocks_are_found"
STATUS_ERROR = "core/test_status.py::test_failed_rows_raise"
DROPPED = "operations/test_rows.py::test_reorder_gives_back_what_several_rows_dropped"

EXTEND = in_module(
    "operations/extend",
    (
        "failed row advances",
        "mark_used(control, rows, False, context_len=new_len)",
        "mark_used(control, seq_ids, False, context_len=context_len + num_new)",
        f"{FAILED_ROW}[extend]",
    ),
    (
        "clock advances on an empty call",
        "clock=clock + grows.any().astype(jnp.uint32)",
        "clock=clock + 1",
        NOTHING_TO_DO,
    ),
    ("idle rows grow", "(num_new > 0) & ~is_active,", "(num_new > 0) & False,", PADDING),
    ("one token too many", "num_new > config.max", "num_new > 1 + config.max", MAX_LEN),
    ("packed tokens past the end", "| ends_outside |", "|", PACKED_END),
    ("padding has slots", "jnp.where(is_token, slot,", "jnp.where(True, slot,", GROUPED_HEADS),
    (
        "blocks behind the window stay",
        "where(is_last, tails, entries)",
        "where(is_last, tails, nowhere)",
        WINDOW_FORKS,
    ),
)

NEW_TOKENS = in_module(
    "operations/new_tokens",
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
)

DEMAND = in_module(
    "operations/extend_plan",
    ("write into a shared block", "owners[-1] > 1", "owners[-1] > 99", BRANCHES),
    ("copy by the one owner", "owners[-1] > 1", "owners[-1] > 0", BRANCHES),
    ("copy needs no block", "+ copies_tail.astype(jnp.int32)", "", SPARE_BLOCK),
    ("failed writer owns no longer", "jnp.where(grows, ids, pool.num_blocks)", "ids", SPARE_BLOCK),
    ("failed row uses up blocks", "jnp.where(grows, jnp.stack(left), free)", "jnp.stack(left)", OTHER_ROWS),
    ("last block not handed out", "grows &= spare[g] >= 0", "grows &= spare[g] > 0", COPY_NEEDS_BLOCK),
    (
        "one block too many promised",
        "<= block_pool.num_available(pool)",
        "<= 1 + block_pool.num_available(pool)",
        f"{FAILED_ROW}[extend]",
    ),
    ("reserved blocks not used", "& (entries == pool.num_blocks)", "", RESERVED),
    (
        "window drops a column too many",
        "group.max_rollback)",
        "group.max_rollback) + 1",
        ROLLBACK,
    ),
    (
        "window drops a column too few",
        "group.max_rollback)",
        "group.max_rollback) - 1",
        f"{BOUNDED}[window 6]",
    ),
    ("max_rollback ignored", ", group.max_rollback)", ")", BEYOND),
    ("free before it is copied", "loses_tail | (is_published & lacks)", "is_published & lacks", COPIED_LATER),
)

REACH = in_module(
    "core/reach",
    ("window read from one token later", "length + 1 -", "length + 2 -", ROLLBACK),
    (
        "no look behind the sinks",
        "jnp.maximum(quotient(first_position, group.block_size), group.num_sink_blocks)",
        "quotient(first_position, group.block_size)",
        "operations/test_windows.py::test_a_window_that_begins_among_the_sinks_and_was_given_back_behind_them_is_lost",
    ),
)

ADMISSION = in_module(
    "operations/allocate",
    (
        "allocate takes one block too many",
        "num_blocks > block_pool",
        "num_blocks > 1 + block_pool",
        f"{FAILED_ROW}[allocate]",
    ),
    ("window reserves its whole prompt", "group.max_held_blocks -", "2**30 -", LONG_PROMPT),
    ("prompt one token too long", "num_tokens > config.max", "num_tokens > 1 + config.max", MAX_LEN),
)

ROWS = in_module(
    "operations/rows",
    (
        "repeated ids are not searched for",
        "skip_unless(~is_ascending.all(), look,",
        "skip_unless(jnp.bool_(False), look,",
        REPEATED,
    ),
    ("equal ids are in order", "(rows[1:] > rows[:-1])", "(rows[1:] >= rows[:-1])", REPEATED),
    ("duplicate ids accepted", "(repeated, Status", "(repeated & False, Status", f"{REPEATED_ROW}[extend]"),
    ("negative ids not refused", "(ids < 0) | (ids >", "(ids >", f"{FAILED_ROW}[free]"),
    ("fork without new owners", "pool = block_pool.share(pool, ids)", "pass", FORK),
    (
        "fork shares reserved blocks",
        "token_blocks(pool, group, control.context_len, src_id)",
        "pool.block_table[src_id]",
        RESERVED,
    ),
    (
        "fork into an active row",
        "(get_at(control.is_active, dst_id), Status",
        "(jnp.bool_(False), Status",
        f"{FAILED_ROW}[fork]",
    ),
    (
        "truncate keeps reserved blocks",
        "num_blocks_for(new_len, ",
        "2**20 * (new_len == context_len).astype(jnp.int32) + num_blocks_for(new_len, ",
        TRUNCATE,
    ),
    (
        "truncate drops the last block",
        "num_blocks_for(new_len, group.block_size)",
        "new_len // group.block_size",
        TRUNCATE,
    ),
    (
        "truncate to more than there is",
        "new_len > context_len,",
        "new_len > 1 + context_len,",
        f"{FAILED_ROW}[truncate]",
    ),
    ("rollback beyond max_rollback", "return is_beyond |", "return", WINDOW_LOST),
    ("second rollback finds nothing lost", "| (is_read & (entry == pool.num_blocks))", "", LOST_TWICE),
    (
        "freed row keeps its length",
        "row, 0) for name in ROW_FIELDS",
        'row, int(name == "context_len")) for name in ROW_FIELDS',
        FREED,
    ),
    (
        "reorder releases before it shares",
        "release(block_pool.share(pool, new_ids), old_ids.T[::-1])",
        "share(block_pool.release(pool, old_ids.T[::-1]), new_ids)",
        REORDER,
    ),
    (
        "touch leaves no mark",
        "return mark_used(control, row, status == Status.OK), status",
        "return control, status",
        ROW_FIELDS,
    ),
    (
        "priority not set",
        "set_at(control.priority, row, priority)",
        "set_at(control.priority, row, 0 * priority)",
        ROW_FIELDS,
    ),
)

BLOCK_POOL = in_module(
    "blocks/block_pool",
    ("one block handed out twice", "pool.num_free - 1 - rank", "pool.num_free - 1 - 0 * rank", RESERVED),
    ("free blocks miscounted", "pool.num_free - num_taken", "pool.num_free - 2 * num_taken", FORK),
    ("released blocks are lost", "num_free=pool.num_free + num_freed)", "num_free=pool.num_free)", FORK),
    (
        "block free while others own it",
        "block_ids, is_last)",
        "block_ids, block_ids < pool.num_blocks)",
        FORK,
    ),
    ("shared block freed twice", "block_ids, is_last)", "block_ids, ref_count[block_ids] == 0)", DROPPED),
    ("peak forgotten", "jnp.maximum(pool.peak_used, num", "jnp.maximum(0, num", FIGURES),
)

INDEXING = in_module(
    "arrays/masked_updates",
    ("negative entries are inside", "(place).astype(jnp.uint32)", "(place)", UPDATES),
    ("entries outside are written", "lax.select(_is_inside(place, array.shape), new, old)", "new", UPDATES),
    (
        "owners counted down too far",
        "_nth(index, n)) == 0",
        "_nth(index, n)) <= 1",
        COUNTED,
    ),
    ("the first of equal owners is last", "is_zero[::-1], index[::-1])", "is_zero, index)", COUNTED),
    ("entries after the last", "lax.full_like(entries, -1,", "lax.full_like(entries, 0,", PER_TRIP),
    ("entries skipped in one array only", "not skips_runs or len(updates) > 1", "not skips_runs", SEVERAL),
    ("negative entries wrap around", '"drop", wrap_negative_indices=False', '"drop"', UPDATES),
    (
        "entries outside are read",
        "lax.select(is_inside, found,",
        "lax.select(is_inside | True, found,",
        READS,
    ),
)

LOOPS = in_module(
    "arrays/loops",
    (
        "the words end early",
        "carry[0] < words.shape[0], over",
        "carry[0] < words.shape[0] - 1, over",
        UPDATES,
    ),
    ("bits count from above", "first + num_below", "first + 31 - num_below", UPDATES),
    ("a word is looked at once", "others = word & (word - 1)", "others = word & 0", UPDATES),
)

SINGLE_KERNEL = in_module(
    "core/single_kernel",
    ("kernels under vmap", "jax.vmap(as_usual,", "jax.vmap(in_kernel,", UPDATES),
    ("kernels on accelerators", "default=many)", "default=jaxpr_as_fun(kernel))", ON_ACCELERATORS),
    ("arguments that nothing reads", "itertools.compress(passed, is_read)", "()", UNREAD),
    ("state that nothing reads", "and given_back[place] is None and", "and", UNREAD),
    (
        "results that nothing reads",
        "lax.optimization_barrier(call(*passed))",
        "call(*passed)",
        UNREAD,
    ),
    ("constants as parameters", "passed = lax.optimization_barrier(_on", "passed = (_on", UNREAD),
    ("kernels hold policies", "index.history is not None", "index.history is None", OTHER_POLICIES),
)

ROW_CALLS = in_module(
    "operations/row_calls",
    ("lists are padded with row 0", "constant_values=fill", "constant_values=0", LISTS),
    ("lists are not padded", "        columns = _padded(", "        _padded(", SAME_PROGRAM),
)

REORDERED = in_module(
    "operations/reorder",
    (
        "reorder one row after the other",
        "return one_control_kernel(functools.partial(rows.reorder_rows, config=config), control, *columns)",
        "def one(control, *row):\n"
        "        control, status = rows.reorder_rows(control, *(x[None] for x in row), config=config)\n"
        "        return control, status[0]\n"
        "    return rows.each_row(one, control, *columns)",
        REORDER,
    ),
)

APPENDED = in_module(
    "attention/append",
    (
        "append writes the first layer's keys",
        "write(cache, layer, k[layer],",
        "write(cache, layer, k[0],",
        BRANCHES,
    ),
)

GATHERED = in_module(
    "attention/gather",
    ("gather wraps ids", "control.context_len, seq_id, 0)", "control.context_len, seq_id % 3, 0)", GATHER),
)

DONATE = in_module(
    "operations/donate",
    ("nothing donated", "jax.jit(fn, donate_argnums=0)", "jax.jit(fn)", DONATED),
)

BUILD = in_module(
    "operations/init",
    ("reset forgets nothing", "return in_place_of(control, ", "return control\n    (", DONATED),
)

ARGUMENTS = in_module(
    "core/arguments",
    ("callers' arrays are read in place", "return np.array(values)", "return np.asarray(values)", REUSED),
    ("callers' keys are read in place", "x.copy() if", "x if", REUSED),
    ("queries mapped over one cache", "if is_mapped and not is_cache_mapped:", "if False:", VMAP),
    ("wide integers wrap", "if values.dtype.itemsize >= 4:", "if values.dtype.itemsize > 8:", WIDE_INTEGERS),
)

TOKEN_ARGUMENTS = in_module(
    "core/token_arguments",
    ("wide token ids are cut", "if values.dtype.itemsize > 4:", "if False:", WIDE_TOKENS),
)

CONFIG = in_module(
    "core/config",
    ("memory plan without the values", "token_bytes = 2 *", "token_bytes = 1 *", BUDGET),
    ("window may hold a block less", "block_size) + 1 +", "block_size) +", f"{BOUNDED}[window 6]"),
    (
        "a window reaches past 32 bits",
        "if reach >= _MAX_INDEX:",
        "if False:",
        "core/test_static_errors.py::test_windows_reach_as_far_as_positions",
    ),
)

STATS = in_module(
    "operations/stats",
    ("copies not needed", "+ copies_tail.astype(jnp.int32)", "", COPY_NEEDS_BLOCK),
    ("own blocks count as shared", "ref_count > 1", "ref_count > 0", FIGURES),
    ("utilization of the emptiest group", "reduce(jnp.maximum,", "reduce(jnp.minimum,", FIGURES),
    ("eviction only above the threshold", "(cache) >= arguments", "(cache) > arguments", FIGURES),
)

STATUS = in_module(
    "core/status",
    ("one good row hides the others", "Status.SKIPPED)).all()", "Status.SKIPPED)).any()", STATUS_ERROR),
)

CHECKS = in_module(
    "inspect/check_invariants",
    ("lost blocks not found", "(times_free == 0) &", "(times_free < 0) &", INVARIANTS),
    ("missing owners not found", "entries != ref_count", "entries > ref_count", INVARIANTS),
)

MUTATIONS = [
    *EXTEND,
    *NEW_TOKENS,
    *DEMAND,
    *REACH,
    *ADMISSION,
    *ROWS,
    *BLOCK_POOL,
    *INDEXING,
    *LOOPS,
    *SINGLE_KERNEL,
    *ROW_CALLS,
    *REORDERED,
    *APPENDED,
    *GATHERED,
    *DONATE,
    *BUILD,
    *ARGUMENTS,
    *TOKEN_ARGUMENTS,
    *CONFIG,
    *STATS,
    *STATUS,
    *CHECKS,
]
