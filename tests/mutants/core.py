"""The mutations of what a cache is, of arguments and statuses, and of the arrays and blocks below."""

from tests.mutants.mutations import FIGURES, FORK, INVARIANTS, RESERVED, in_module

REUSED = "operations/test_eager_calls.py::test_callers_may_overwrite_their_arrays_after_the_call"
BUDGET = "operations/test_cases.py::test_case_a_sizes_from_a_memory_budget"
WIDE_INTEGERS = (
    "operations/test_failures.py::test_integers_beyond_32_bits_never_wrap_into_a_valid_one[4294967300]"
)
VMAP = "core/test_static_errors.py::test_batched_queries_need_a_batched_cache"
WIDE_TOKENS = "core/test_static_errors.py::test_token_ids_that_do_not_fit_are_refused"
STATUS_ERROR = "core/test_status.py::test_failed_rows_raise"
DROPPED = "operations/test_rows.py::test_reorder_gives_back_what_several_rows_dropped"

VMAPPED = "operations/test_vmapped_caches.py"
ARRAYS = "arrays/test_masked_updates.py"
READS = f"{ARRAYS}::test_reads_outside_give_the_fill"
UPDATES = f"{ARRAYS}::test_updates_skip_what_is_outside"
COUNTED = f"{ARRAYS}::test_the_last_of_equal_entries_takes_the_last_one"
ONE_OF_EQUAL = f"{ARRAYS}::test_one_of_equal_masked_entries_is_found"
RANKED = f"{ARRAYS}::test_true_entries_are_ranked_and_found"

CASES = "prefix/test_prefix_case_calls.py"
EQUAL_PROMPTS = f"{CASES}::test_case_hh_two_equal_prompts_revive_their_hits_once"
QUEUE = f"{CASES}::test_case_ii_the_queue_after_two_rows_that_share_blocks"
SWEPT = "prefix/test_prefix_transforms.py::test_a_full_queue_is_swept_in_place[3-4]"
SWEEPS = "prefix/test_prefix_transforms.py::test_calls_that_change_nothing_sweep_nothing"

MUTATIONS = [
    *in_module(
        "arrays/masked_updates",
        (
            "under vmap each cache has its own number of trips",
            "return _common_bound(jnp.max(num_trips, axis=0)), False",
            "return num_trips, True",
            f"{VMAPPED}::test_no_step_over_several_caches_copies_their_pools[copy on write]",
        ),
        ("negative entries are inside", "(place).astype(jnp.uint32)", "(place)", READS),
        (
            "entries outside are read",
            "lax.select(is_inside, found,",
            "lax.select(is_inside | True, found,",
            READS,
        ),
        (
            "negative entries wrap around",
            ', mode="drop", wrap_negative_indices=False',
            ', mode="drop"',
            f"{UPDATES}[set]",
        ),
        ("entries outside are written", '(values, mode="drop",', '(values, mode="clip",', f"{UPDATES}[add]"),
        ("the less is kept for the greater", 'values, "max")', 'values, "min")', f"{UPDATES}[max]"),
        (
            "owners counted down too far",
            "get_at(left, index, 1) == 0",
            "get_at(left, index, 1) <= 1",
            COUNTED,
        ),
        (
            "the first of equal owners is last",
            "is_last, left = last_of_equal(",
            "is_last, left = first_of_equal(",
            COUNTED,
        ),
        (
            "marks of the last owners stay",
            "return set_at(left, jnp.where(is_last, index, left.shape[0]), 0), is_last",
            "return left, is_last",
            COUNTED,
        ),
        (
            "the first of equal entries is the last",
            "mask, index, order - index.size)",
            "mask, index, -1 - order)",
            f"{ONE_OF_EQUAL}[first_of_equal-0]",
        ),
        (
            "entries without a mask mark too",
            "min_at(array, jnp.where(mask, index, array.shape[0]), mark)",
            "min_at(array, index, mark)",
            f"{ONE_OF_EQUAL}[last_of_equal--1]",
        ),
        ("ranks count the entry itself", "return up_to - mask.astype(jnp.int32), ", "return up_to, ", RANKED),
        (
            "done whatever the condition",
            "lambda carry: carry[1], once, (state, condition)",
            "lambda carry: carry[1], once, (state, condition | True)",
            f"{ARRAYS}::test_what_is_done_once_or_not_at_all",
        ),
    ),
    *in_module(
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
        (
            "cached blocks are not available",
            "pool.num_free + pool.cached.num_cached",
            "pool.num_free",
            EQUAL_PROMPTS,
        ),
        (
            "published blocks do not stay",
            "stays = is_last & is_published(",
            "stays = is_last & ~is_published(",
            QUEUE,
        ),
        (
            "hits of two rows are revived twice",
            "num_cached=pool.cached.num_cached - num_true(is_revived))",
            "num_cached=pool.cached.num_cached - num_true(has_no_owner(pool.ref_count, block_ids)))",
            EQUAL_PROMPTS,
        ),
        (
            "queue not swept for what is reused",
            "return sweep_queue(_note_peak(pool), is_revived.any())",
            "return _note_peak(pool)",
            SWEEPS,
        ),
        (
            "entries that were released again count",
            "is_entry &= get_at(cached.queued_at, block_ids, 0) == positions",
            "pass",
            SWEPT,
        ),
        (
            "blocks with an owner are evicted",
            "is_cached &= has_no_owner(ref_count, block_ids)",
            "pass",
            SWEPT,
        ),
        (
            "a sweep leaves gaps",
            "positions = end + rank.astype(jnp.uint32)",
            "positions = position + order",
            SWEPT,
        ),
        ("a sweep forgets where blocks stand", "set_at(queued_at, moved, positions)", "queued_at", SWEPT),
        (
            "blocks are withdrawn and stay published",
            "set_at(pool.cached.is_published, block_ids, False)",
            "pool.cached.is_published",
            QUEUE,
        ),
    ),
    *in_module(
        "core/arguments",
        ("callers' arrays are read in place", "return np.array(values)", "return np.asarray(values)", REUSED),
        ("callers' keys are read in place", "x.copy() if", "x if", REUSED),
        ("queries mapped over one cache", "if is_mapped and not is_cache_mapped:", "if False:", VMAP),
        (
            "wide integers wrap",
            "if values.dtype.itemsize >= 4:",
            "if values.dtype.itemsize > 8:",
            WIDE_INTEGERS,
        ),
    ),
    *in_module(
        "core/token_arguments",
        ("wide token ids are cut", "if values.dtype.itemsize > 4:", "if False:", WIDE_TOKENS),
    ),
    *in_module(
        "layers/layer_group",
        (
            "memory plan of one array",
            "return self.num_layers * sum(values)",
            "return self.num_layers * max(values)",
            BUDGET,
        ),
    ),
    *in_module(
        "core/status",
        ("one good row hides the others", "Status.SKIPPED)).all()", "Status.SKIPPED)).any()", STATUS_ERROR),
    ),
    *in_module(
        "inspect/check_invariants",
        ("lost blocks not found", "(times_free == 0) &", "(times_free < 0) &", INVARIANTS),
        ("missing owners not found", "entries != ref_count", "entries > ref_count", INVARIANTS),
    ),
]
