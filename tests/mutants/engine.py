"""Mutations of the engine; see `mutations.py`."""

from tests.mutants.mutations import in_module

ENGINE = "engine/test_engine.py"
ONE_AFTER_THE_OTHER = f"{ENGINE}::test_a_pool_that_one_request_fills_never_stands_still"
NEW_WEIGHTS = f"{ENGINE}::test_new_weights_between_chunks"
NAN_LOGITS = f"{ENGINE}::test_a_row_with_nan_logits_ends_alone"
ENDS = "engine/test_ends.py"
NAMESPACES = "engine/test_namespaces.py"
SAMPLES = "engine/test_engine.py::test_samples_fork_the_prompt"
POLICIES = "engine/test_options.py::test_policies_order_requests"
BITS = "engine/test_batch_invariance.py::test_bits_are_those_of_the_request_alone"
DRAFTS = "engine/test_faults.py::test_nan_logits_behind_drafts_hurt_no_other_row"


MUTATIONS = [
    *in_module(
        "engine/engine",
        (
            "an interrupt loses the report that was awaited",
            "self.read(self._in_flight[0])",
            "(self.read(self._in_flight.popleft()), self._in_flight.appendleft(None))[0]",
            "engine/test_faults.py::test_an_interrupt_while_a_report_is_awaited_loses_no_token",
        ),
        (
            "two consumers take in reports as they come",
            "with self._consumer:",
            "with threading.Lock():",
            "engine/test_faults.py::test_consumers_that_are_cancelled_leave_the_order_of_tokens",
        ),
        (
            "a chunk that was not dispatched told of new weights",
            "parcels = [table.pack(self._has_new_weights)",
            "told, self._has_new_weights = self._has_new_weights, False\n        parcels = [table.pack(told)",
            "engine/test_faults.py::test_new_weights_reach_rows_though_a_dispatch_raised",
        ),
        (
            "pushes wait for the compiler",
            "            self.lower().compile()\n",
            "            pass\n",
            "engine/test_compiled.py::test_a_push_does_not_wait_while_the_program_is_compiled",
        ),
        (
            "a number is given that a later request of the push names",
            "self._next_id in ids or ",
            "",
            "engine/test_ids.py::test_a_number_that_is_given_is_none_that_another_request_names",
        ),
    ),
    *in_module(
        "engine/requests",
        (
            "an id that cannot be hashed is refused by Python's words",
            "        hash(request_id)\n",
            "        pass\n",
            "engine/test_ids.py::test_an_id_that_cannot_be_hashed_is_refused_in_a_sentence",
        ),
    ),
    *in_module(
        "engine/table",
        (
            "runs are not joined when they come back",
            "self._starts[i - 1] + self._lens[i - 1] == start",
            "False",
            f"{ENGINE}::test_one_long_request_takes_the_place_of_many",
        ),
        (
            "requests that wait keep the namespace of older weights",
            "for slot, sample in self._by_slot.items():",
            "for slot, sample in ():",
            f"{NAMESPACES}::test_who_waits_is_computed_under_new_weights",
        ),
        (
            "prefixes of older weights are found",
            "        self._weights = namespace\n",
            "",
            NEW_WEIGHTS,
        ),
        (
            "the longest answers wrap",
            "min(request.max_new_tokens, max_seq_len + 1)",
            "min(request.max_new_tokens, 2**31 - 1)",
            f"{ENDS}::test_answers_of_any_length_are_refused_and_overwrite_nothing",
        ),
        (
            "all samples draw alike",
            "sample_seed(request.seed, sample.sample_id)",
            "sample_seed(request.seed, 0)",
            SAMPLES,
        ),
    ),
    *in_module(
        "engine/events",
        ("an end without a token is one of -1", "rows[rows[:, 2] != NO_TOKEN]", "rows", NAN_LOGITS),
    ),
    *in_module(
        "engine/chunk",
        (
            "rows under older weights go on publishing",
            "state.may_publish & ~inbox.has_new_weights",
            "state.may_publish",
            "engine/test_faults.py::test_new_weights_reach_rows_though_a_dispatch_raised",
        ),
        (
            "service has no end",
            "jnp.minimum(service, _MOST_SERVICE)",
            "service",
            f"{ENDS}::test_service_of_one_who_asks_alone_has_an_end",
        ),
        (
            "the batch-invariant mode is not chosen",
            "take_invariant_step if options.batch_invariant else take_step",
            "take_step",
            BITS,
        ),
        (
            "new weights are not counted",
            "updates=inbox.has_new_weights[None]",
            "updates=jnp.zeros(1, bool)",
            NEW_WEIGHTS,
        ),
        (
            "a request that fills the pool is refused",
            "group.max_held_blocks) > pool.num_blocks",
            "group.max_held_blocks) >= pool.num_blocks",
            f"{ENGINE}::test_what_could_never_run_is_refused_at_once",
        ),
    ),
    *in_module(
        "engine/admit",
        (
            "prompts that share are computed at the same time",
            "is_one & _shares_what_is_computed(state, prompts)",
            "is_one & False",
            "engine/test_engine.py::test_of_equal_prompts_in_one_batch_one_is_computed",
        ),
    ),
    *in_module(
        "engine/order",
        (
            "steps are counted from the engine's first one",
            "requests.arrival_step - state.step",
            "requests.arrival_step",
            f"{ENDS}::test_who_came_first_goes_first_when_the_count_of_steps_begins_again",
        ),
        (
            "hits may end inside items",
            "items = None if requests.items is None else get_at(requests.items, slots, 0)",
            "items = None",
            "engine/test_options.py::test_hits_never_end_inside_an_item",
        ),
    ),
    *in_module(
        "engine/policies",
        (
            "preemptions outweigh any priority",
            "jnp.minimum(requests.num_preemptions, _MOST_BOOSTS)",
            "requests.num_preemptions",
            POLICIES,
        ),
        (
            "a request is passed once too often",
            "requests.num_bypassed >= requests.max_bypasses",
            "requests.num_bypassed > requests.max_bypasses",
            POLICIES,
        ),
    ),
    *in_module(
        "engine/preempt",
        (
            "the next worse row gives way instead of the worst",
            "jnp.max(jnp.where(get_at(is_worse, order), ranks, 0))",
            "jnp.min(jnp.where(get_at(is_worse, order), ranks, max_seqs))",
            f"{ENGINE}::test_the_worst_row_gives_way",
        ),
    ),
    *in_module(
        "engine/setup",
        (
            "numbers of samples are given without end",
            "for request in requests) > num_left",
            "for request in requests) < 0",
            f"{ENDS}::test_numbers_of_samples_come_to_an_end",
        ),
        (
            "sizes have no upper end",
            'static_count(name, value, least, _MOST, "2**30")',
            "static_count(name, value, least)",
            f"{ENDS}::test_what_is_beyond_is_refused_in_a_sentence",
        ),
        (
            "a step of many rows admits as few as one of few rows",
            "return max(4, max_seqs // 64)",
            "return 4",
            "engine/test_long_runs.py::test_many_rows_are_full_within_some_dozens_of_steps",
        ),
    ),
    *in_module(
        "engine/shards",
        (
            "the first state is committed to no device",
            "sizes, outbox_shape), self._home)",
            "sizes, outbox_shape))",
            "engine/test_compiled.py::test_parameters_in_any_form_are_served_by_one_program",
        ),
    ),
    *in_module(
        "engine/schedule",
        (
            "a prompt's second piece begins like its first",
            "first = get_at(state.cache.context_len, row, 0) + nth * piece_len",
            "first = get_at(state.cache.context_len, row, 0)",
            ONE_AFTER_THE_OTHER,
        ),
    ),
    *in_module(
        "engine/parts",
        (
            "masks are taken as logits",
            "jnp.issubdtype(processed.dtype, jnp.floating)",
            "True",
            "engine/test_options.py::test_a_hook_that_returns_something_else_is_named",
        ),
        (
            "rows without numbers publish what they computed",
            "is_good & state.may_publish",
            "state.may_publish",
            NAN_LOGITS,
        ),
    ),
    *in_module(
        "engine/invariant",
        (
            "the first part of prompts is computed again and again",
            "_part_of((prompts.tokens, prompts.step), part * length, length)",
            "_part_of((prompts.tokens, prompts.step), part * 0, length)",
            BITS,
        ),
    ),
    *in_module(
        "engine/draw",
        (
            "a token is drawn from logits that are no numbers",
            "jnp.where(is_there & is_drawn, 1, 0)",
            "jnp.where(is_there, 1, 0)",
            NAN_LOGITS,
        ),
        (
            "bans of all tokens are called NaN",
            "Finish.NO_TOKEN, Finish.NAN_LOGITS)",
            "Finish.NAN_LOGITS, Finish.NAN_LOGITS)",
            "engine/test_options.py::test_a_request_whose_tokens_are_all_banned_says_so",
        ),
        (
            "accepted drafts hide logits that are no numbers",
            "jnp.minimum(1 + num_accepted, num_drawn)",
            "1 + num_accepted",
            DRAFTS,
        ),
        (
            "the token that ends a request is left out",
            "first_true(is_stop) + 1, num_tokens",
            "first_true(is_stop), num_tokens",
            f"{ENGINE}::test_the_first_token_may_be_the_last",
        ),
    ),
    *in_module(
        "operations/reserve",
        (
            "of two owners of a last block neither copies it",
            "(get_at(owners, tail, 0) > 1)",
            "(get_at(owners, tail, 0) > 2)",
            f"{ENGINE}::test_the_copy_of_a_shared_last_block_counts_among_what_a_row_needs",
        ),
        (
            "a copy's tokens are not those of the original",
            "copy_tokens(index.block_tokens, copied)",
            "index.block_tokens",
            SAMPLES,
        ),
    ),
]
