"""The mutations of the manager, `explain`, `scrub` and `poison`, and of what checks and refuses."""

from tests.mutants.mutations import in_module

REPLACED = "manager/test_manager.py::test_replace_ends_the_old_request_only_if_the_new_one_fits"
ERRORS = "manager/test_manager.py::test_typed_errors_change_nothing"
LIFE = "manager/test_manager.py::test_the_life_of_requests[prefix caching]"
WINDOWS = "manager/test_manager.py::test_blocks_of_windows_have_holes"
HIT_RATE = "manager/test_manager.py::test_no_query_yet_is_not_a_hit_rate_of_zero"
COUNTS = "manager/test_manager.py::test_counts_go_on_where_the_cache_wraps"
STREAM = "manager/test_manager.py::test_requests_drop_tokens_in_place_of_ending"
GIVE_WAY = "manager/test_manager.py::test_whole_requests_give_way"
DRAFTS = "manager/test_manager.py::test_drafts_and_namespaces"
BATCHES = (
    "manager/test_manager_steps.py::test_batches_have_the_rows_of_the_call_and_the_widths_of_the_manager"
)
TURNS = "manager/test_manager_steps.py::test_every_call_takes_its_turn"
THREADS = "manager/test_manager_steps.py::test_threads_take_turns[prefix caching]"
LOST = (
    "manager/test_manager_steps.py::test_a_step_that_fails_on_the_device_is_told_and_the_manager_starts_over"
)
OUT_OF_SYNC = "manager/test_manager_steps.py::test_a_request_whose_row_was_ended_can_be_freed_or_replaced"
FOREIGN = "manager/test_manager_steps.py::test_a_batch_of_another_manager_is_refused"
DONATED = (
    "manager/test_manager_steps.py::test_a_cache_donated_elsewhere_is_told_and_the_manager_starts_over[stats]"
)
STALE = "manager/test_manager_steps.py::test_a_batch_whose_slots_may_be_anothers_is_refused"
BROKEN = "inspect/test_check_invariants.py::test_broken_rows_and_blocks_are_found"
ROW_FIELDS = "operations/test_rows.py::test_priority_namespace_and_recency_follow_the_rows"
BAD_MODEL = "testing/test_testing.py::test_a_bad_model_is_named"
STACKED = "core/test_cache_checks.py::test_stacked_caches_are_refused"
SPARED = "testing/test_testing.py::test_poison_spares_what_later_prompts_may_read"

LEAVES = "prefix/test_explain.py::test_where_a_prompt_leaves_what_is_cached"
NOT_THERE = "prefix/test_explain.py::test_what_was_evicted_or_is_not_committed"
CUT = "prefix/test_explain.py::test_an_item_that_would_be_cut"
ELSEWHERE = "prefix/test_explain.py::test_other_namespaces_are_not_described"

OWN = "operations/test_scrub.py::test_scrubbing_a_row_overwrites_what_it_alone_holds"
BEHIND = "operations/test_scrub.py::test_cached_blocks_that_continue_a_scrubbed_one_go_along"
NAMESPACE = "operations/test_scrub.py::test_scrubbing_a_namespace_leaves_nothing_of_it"
FORKS = "operations/test_scrub.py::test_the_longest_of_the_forks_that_share_a_last_block_keeps_its_tokens"
PUBLISHED = "operations/test_scrub.py::test_a_published_last_block_keeps_all_its_tokens"
ROWS_SCRIPT = "operations/test_scrub_scripts.py::test_scrubbing_rows_overwrites_what_they_alone_hold"
RESERVED = "operations/test_scrub.py::test_what_another_namespace_reserved_is_overwritten_too"

MUTATIONS = [
    *in_module(
        "manager/manager",
        (
            "a replaced request is gone although the new one does not fit",
            "status = Status(int(admission.status[0]))",
            "status, self._holder.cache = Status(int(admission.status[0])), new",
            REPLACED,
        ),
        ("who declined reuse counts as a query", "if reuse and self._config", "if self._config", HIT_RATE),
        ("drafts are committed", "] = list(lengths.values())", "] = TO_THE_END", DRAFTS),
        (
            "an ended request keeps its id",
            "on_control(programs.free, seq_ids)\n            self._end(request_id)",
            "on_control(programs.free, seq_ids)",
            LIFE,
        ),
    ),
    *in_module(
        "manager/eviction",
        ("requests without a row stay", "if not is_active[row]:", "if False:", GIVE_WAY),
        ("requests that go on are ended", "if not is_active[row]:", "if True:", STREAM),
        (
            "the manager ends whatever is asked for",
            "partial(operation, target",
            "partial(preempt_to_utilization, target",
            STREAM,
        ),
    ),
    *in_module(
        "manager/queries",
        ("a hole has slots", "if block_id == layer_group.num_blocks:", "if False:", WINDOWS),
        ("a request without a row is read", "if not is_active[seq_id]:", "if False:", OUT_OF_SYNC),
    ),
    *in_module(
        "manager/programs",
        (
            "some of an append that fails is done",
            "num_new = jnp.where(_is_fine(trial.status).all(), num_new, 0)",
            "pass",
            ERRORS,
        ),
        (
            "blocks of the replaced request are not available",
            "control = free_rows(cache, freed[None])[0].control",
            "control = cache.control",
            REPLACED,
        ),
    ),
    *in_module(
        "manager/rows",
        ("padding of a batch names row 0", "[self.max_seqs] * (self", "[0] * (self", BATCHES),
        ("the hit rate of all time", "maxlen=_REQUESTS_OF_HIT_RATE", "maxlen=None", HIT_RATE),
        ("counts wrap", ") % 2**32", ") % 2**31", COUNTS),
    ),
    *in_module(
        "manager/requests",
        (
            "everybody in one namespace",
            "else np.asarray(namespace)",
            "else 0 * np.asarray(namespace)",
            DRAFTS,
        ),
    ),
    *in_module(
        "manager/locked_cache",
        ("a donated cache is not noticed", "if _is_gone(self.cache):", "if False:", DONATED),
        (
            "a step closes the manager",
            'if self._is_running:\n                raise ManagerBusy("close',
            'if False:\n                raise ManagerBusy("close',
            TURNS,
        ),
        (
            "threads do not wait for each other",
            "self._lock = threading.RLock()",
            "self._lock = contextlib.nullcontext()",
            THREADS,
        ),
        ("the hash key is lost with the cache", "control, hash_key=hash_key)", "control)", LOST),
        (
            "a question gives the cache away",
            "if self._is_kept:",
            "if False:",
            "manager/test_manager_steps.py::test_a_question_runs_no_step",
        ),
        (
            "a step changes the config",
            "if result[0].config != cache.config:",
            "if False:",
            "manager/test_manager_steps.py::test_what_cannot_be_run_or_asked_is_named",
        ),
    ),
    *in_module(
        "core/cache_checks",
        ("stacked caches are taken for one", "    if is_batched(cache.control):", "    if False:", STACKED),
    ),
    *in_module(
        "operations/set_priority",
        (
            "priorities saturate",
            "arguments.priorities(priority, seq_ids",
            "arguments.int_column('', priority, seq_ids",
            ROW_FIELDS,
        ),
    ),
    *in_module(
        "inspect/check_invariants", ("any peak will do", "<= peak_used <= nowhere", "<= peak_used", BROKEN)
    ),
    *in_module(
        "testing/forward_checks",
        ("a forward may extend rows", "np.array_equal(found, lengths)", "True", BAD_MODEL),
    ),
    *in_module(
        "inspect/block_view",
        (
            "cached blocks look free",
            '= "cached"',
            '= "free"',
            "inspect/test_block_map.py::test_cached_blocks_are_neither_used_nor_free",
        ),
    ),
    *in_module(
        "testing/poisoned_slots",
        (
            "a stray read finds a scale of 0",
            "jnp.iinfo(values.dtype).min or",
            "jnp.iinfo(values.dtype).min and",
            "kinds/test_kinds.py::test_a_cell[int4-poison]",
        ),
        (
            "cached blocks are spoilt",
            "< num_tokens[:, None]",
            "< (num_tokens * (cache.control.block_pools[g].ref_count > 0).astype(jnp.int32))[:, None]",
            SPARED,
        ),
    ),
    *in_module(
        "inspect/explain_miss",
        ("the block in place of the token", "At position {start + same}", "At position {start}", LEAVES),
        (
            "any cached sequence for the nearest",
            "children[num_same.argmax()], int(num_same.max())",
            "children[0], int(num_same[0])",
            LEAVES,
        ),
        ("nothing said of uncommitted rows", "if _is_held(", "if False and _is_held(", NOT_THERE),
        (
            "rows of other namespaces are told of",
            "& (view.row_namespace == namespace).all(axis=1)",
            "",
            ELSEWHERE,
        ),
        ("other namespaces never have more", "num_found(other, spans) > found", "False", ELSEWHERE),
        (
            "other namespaces have what the first group has",
            "num_found(other, spans) > found",
            "True",
            "prefix/test_explain.py::test_another_namespace_is_named_where_it_would_serve_more",
        ),
        (
            "what was evicted was never there",
            ".all(axis=1).any())",
            ".all(axis=1).all())",
            "prefix/test_explain.py::test_an_eviction_is_told_where_something_else_goes_on",
        ),
        ("items may be cut", "num_found(words, spans), ", "num_found(words, spans[:, :0]), ", CUT),
    ),
    *in_module(
        "operations/scrub",
        (
            "tokens behind a row's last one stay in the index",
            "control = _forget_rests(control, cache.config)",
            "pass",
            "operations/test_scrub.py::test_the_index_forgets_tokens_behind_the_last_one_of_a_row",
        ),
        ("shared blocks are scrubbed", "(num_refs == pool.ref_count)", "(pool.ref_count > 0)", OWN),
        (
            "cached blocks behind scrubbed ones stay",
            "return mask | behind, behind.any()",
            "return mask, jnp.bool_(False)",
            BEHIND,
        ),
        (
            "what goes with cached blocks stays",
            "masks[g] |= is_cached(g) & get_at",
            "masks[g] |= False & get_at",
            ROWS_SCRIPT,
        ),
        (
            "tokens stay readable",
            "jnp.where(mask[:, None], 0, index.block_tokens)",
            "index.block_tokens",
            OWN,
        ),
        (
            "what was overwritten has a gradient",
            "return _overwrite(group, grads, *where), None, None",
            "return grads, None, None",
            "operations/test_derivatives.py::test_what_moves_tokens_has_its_gradient[full]",
        ),
        (
            "the rests of last blocks stay",
            "rests is None else _zero_rests(",
            "True else _zero_rests(",
            NAMESPACE,
        ),
        (
            "reserved blocks stay",
            "is_other[:, None] & (columns * group.block_size < length[:, None])",
            "is_other[:, None] & (columns >= 0)",
            RESERVED,
        ),
    ),
    *in_module(
        "manager/batches",
        ("what was lost is not noted", "each.lost_by = (request_id,)", "pass", STALE),
        ("blocks never move", "each.may_have_moved |= not", "each.may_have_moved &= not", STALE),
        ("another manager's batch is run", "raise errors.foreign_batch()", "pass", FOREIGN),
    ),
    *in_module(
        "operations/scrub",
        (
            "longer forks are cut",
            "jnp.clip(row_len(control, group.kind)[:, None] - starts[None], 0, block_size)",
            "(row_len(control, group.kind)[:, None] - starts[None]) % block_size",
            FORKS,
        ),
        (
            "published blocks are cut",
            "jnp.where(pool.cached.is_published, block_size, num_tokens)",
            "num_tokens",
            PUBLISHED,
        ),
    ),
]
