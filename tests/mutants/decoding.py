"""Mutations of decoding; see `mutations.py`."""

from tests.mutants.mutations import in_module

GREEDY = "decoding/test_generate.py::test_greedy_equals_the_model_without_a_cache[12]"
STOPS = "decoding/test_generate.py::test_stop_tokens_end_a_row_and_free_it_for_the_next"
SPECULATIVE = "decoding/test_generate.py::test_speculative_greedy_decoding_gives_the_same_tokens[ngram-roomy]"
FILTERS = "decoding/test_sampling.py::test_filters_match_oracle"
DRAWS = "decoding/test_sampling.py::test_a_draw_depends_on_its_row_alone"
ACCEPTED = "decoding/test_sampling.py::test_speculation_emits_what_the_target_would"
BEAMS = "decoding/test_beam_search.py::test_beam_search_equals_a_search_on_lists"
SCORES = "decoding/test_generate.py::test_score_equals_the_model_without_a_cache"
TOKEN_IDS = "decoding/test_decode_arguments.py::test_token_ids_are_checked_alike"
ROOM = "decoding/test_generate_room.py"
UNPUBLISHED = "decoding/test_nan_logits.py::test_what_gave_no_numbers_is_not_published"

MUTATIONS = [
    *in_module("decoding/arguments", ("token ids below 0", "(tokens < 0).any()", "False", TOKEN_IDS)),
    *in_module(
        "decoding/generate",
        (
            "the first state is typed weakly",
            "int(Phase.IDLE)",
            "Phase.IDLE",
            "decoding/test_generate.py::test_prompts_that_wait_compile_nothing",
        ),
    ),
    *in_module(
        "decoding/admission",
        (
            "prompts are shared with everybody",
            "tokens=tokens, namespace=namespace",
            "tokens=tokens",
            "decoding/test_generate_prefix.py::test_prompts_share_within_a_namespace",
        ),
        (
            "samples that start later draw what the first ones drew",
            "in zip(sample_ids[:num_samples], rows, strict=True)",
            "in enumerate(rows)",
            f"{ROOM}::test_every_answer_is_the_one_that_it_has_alone[windows]",
        ),
        (
            "prompts that share are computed together",
            "return num_common > 0 and",
            "return False and",
            "decoding/test_generate_prefix.py::test_prompts_of_one_call_share_what_they_have_in_common",
        ),
    ),
    *in_module(
        "decoding/prefill",
        (
            "a row's later pieces begin it again",
            "order - pieces.nth].add",
            "order].add",
            GREEDY,
        ),
        (
            "the first row's logits are everybody's",
            "pieces.last_of[i] = row",
            "pieces.last_of[i] = 0",
            GREEDY,
        ),
    ),
    *in_module(
        "decoding/score",
        (
            "the context is shared with everybody",
            "tokens=found_by, namespace=words",
            "tokens=found_by",
            "decoding/test_generate_prefix.py::test_other_weights_find_nothing_in_another_namespace",
        ),
    ),
    *in_module(
        "decoding/room",
        (
            "the copy of a block that is hit in part is nobody's need",
            "num_published = int(np.asarray(pool.cached.is_published)[tails].sum())",
            "pass",
            "decoding/test_generate_prefix.py::test_a_prompt_waits_for_the_copy_that_another_still_makes",
        ),
        (
            "prompts start without blocks for what follows",
            "for length in (prompt_len, max_len - 1)",
            "for length in (prompt_len, prompt_len)",
            "decoding/test_generate.py::test_a_prompt_waits_until_all_that_it_may_store_fits",
        ),
        (
            "the copies of a prompt's last block are not counted",
            "int(is_copied)",
            "0",
            f"{ROOM}::test_as_many_samples_start_as_fit_side_by_side[8-prompt1-5-4-3]",
        ),
        (
            "nobody asks whether samples fit side by side",
            "while num_fit > 1 and",
            "while False and",
            f"{ROOM}::test_as_many_samples_start_as_fit_side_by_side[2-prompt2-7-2-1]",
        ),
        (
            "what samples share of a window is shared for ever",
            "prompt, end, int(is_copied)",
            "prompt, min(end, group.max_held_blocks), int(is_copied)",
            f"{ROOM}::test_samples_share_a_window_only_until_it_has_passed",
        ),
        (
            "rows beyond their windows are counted as if they let nothing go",
            "return min(num_held + num_taken + num_copies, apart + num_published)",
            "return num_held + num_taken + num_copies",
            f"{ROOM}::test_samples_share_a_window_only_until_it_has_passed",
        ),
    ),
    *in_module(
        "decoding/host",
        (
            "stop strings looked for at the end alone",
            "range(num_checked + 1,",
            "range(len(tokens),",
            "decoding/test_decode_arguments.py::test_texts_to_stop_at_count_though_later_tokens_hide_them",
        ),
        (
            "answers are not published",
            "cache, _ = commit(cache, row_list(to_publish, max_seqs))",
            "pass",
            "decoding/test_generate_prefix.py::test_a_later_call_finds_prompts_and_answers_of_an_earlier_one",
        ),
        (
            "answers that end without numbers are published",
            "if phase[row] != Phase.NAN_LOGITS]",
            "]",
            UNPUBLISHED,
        ),
    ),
    *in_module(
        "decoding/loop",
        (
            "first token from another prompt",
            "logits[source], status[source]",
            "logits[0 * source], status[source]",
            GREEDY,
        ),
        (
            "drafts are verified as if drawn without filters",
            "(token, logprobs, is_drafting)",
            "(token, jax.nn.log_softmax(logits), is_drafting)",
            "decoding/test_sampling.py::test_generate_draws_what_the_filtered_target_would",
        ),
        ("stop token does not end the row", "jnp.where(stops, Phase", "jnp.where(False, Phase", STOPS),
        (
            "a first token that ends a row is overlooked",
            "none_ended = (is_running | is_idle).all()",
            "none_ended = ~is_idle.all()",
            "decoding/test_generate.py::test_a_row_that_ends_with_its_first_token_makes_room_before_any_step",
        ),
        (
            "rejected drafts stay in the cache",
            "rows, before + 1 + num_accepted)",
            "rows, before + 1 + count)",
            SPECULATIVE,
        ),
        (
            "drafts cost another row its token",
            "running & _have_room(state.cache, running, count)",
            "running",
            "decoding/test_generate.py::test_drafts_cost_no_row_a_token",
        ),
        (
            "one row without room keeps others from drafting",
            "have_room &= (more == 0) | (jnp.cumsum",
            "have_room &= (jnp.cumsum",
            "decoding/test_generate.py::test_one_row_without_room_does_not_keep_others_from_drafting",
        ),
    ),
    *in_module(
        "decoding/prefill",
        (
            "a row's end leaves a call empty",
            "piece_len = ceil_div(prefill_len, _PIECES)",
            "piece_len = prefill_len",
            "decoding/test_prefill.py::test_a_call_of_the_model_holds_pieces_of_several_prompts",
        ),
        (
            "what gave no numbers is published",
            "commit(cache, _with_numbers(fed.logits, rows))",
            "commit(cache, rows)",
            UNPUBLISHED,
        ),
        (
            "a prompt that failed is fed on",
            "(pieces.nth == 0) & (get_at(status, pieces.rows, Status.SKIPPED) == Status.OK)",
            "pieces.nth == 0",
            "decoding/test_prefill.py::test_a_prompt_that_failed_is_fed_no_further",
        ),
        (
            "prompt's second last logits",
            "step.query_len - 1, 0)",
            "step.query_len - 2, 0)",
            "decoding/test_generate_prefix.py::test_prompts_of_one_call_share_what_they_have_in_common",
        ),
    ),
    *in_module(
        "decoding/sampling",
        ("top-p without the last token", "1 + num_true(is_before[:-1])", "num_true(is_before[:-1])", FILTERS),
        ("same draw at every position", "fold_in)(keys, position)", "fold_in)(keys, 0 * position)", DRAWS),
    ),
    *in_module(
        "decoding/speculation",
        ("drafts accepted as if certain", "drafts] - draft[place, drafts]", "drafts]", ACCEPTED),
        (
            "rejected draft drawn again",
            "jnp.exp(logprobs) - jnp.exp(get_at(draft, rejected, -jnp.inf)), 0)",
            "jnp.exp(logprobs), 0)",
            ACCEPTED,
        ),
        (
            "looked-up drafts accepted that there are not",
            "(drawn[:-1] == drafts) & (place < num_drafts)",
            "drawn[:-1] == drafts",
            "decoding/test_sampling.py::test_greedy_target_accepts_its_own_tokens_only",
        ),
    ),
    *in_module(
        "decoding/beam_search",
        ("beams keep their own rows", "rows[:, :1] + parents", "rows + 0 * parents", BEAMS),
        ("length penalty left out", "best / scale[:, None]", "best", BEAMS),
        (
            "a search without blocks looks complete",
            '"out_of_blocks" if is_failed else "stop"',
            '"stop"',
            "decoding/test_beam_search.py::test_a_beam_search_says_that_it_ran_out_of_blocks[5-out_of_blocks]",
        ),
    ),
    *in_module(
        "decoding/score",
        (
            "the last token of a continuation is fed too",
            "cache, history, length - 1, prefill_len",
            "cache, history, length, prefill_len",
            "decoding/test_generate_prefix.py::test_score_feeds_every_token_once",
        ),
        (
            "a row for a continuation of one token",
            "if len(tokens) > 1], []",
            "if len(tokens)], []",
            "decoding/test_generate_prefix.py::test_score_feeds_every_token_once",
        ),
        (
            "score of the token before",
            "slice(pieces.first[i] + 1, pieces.first[i] + 1 + num_tokens)",
            "slice(pieces.first[i], pieces.first[i] + num_tokens)",
            SCORES,
        ),
        ("one first token for all", "found[0] = firsts[tokens[0]]", "found[0] = firsts[0]", SCORES),
        (
            "continuations that failed together are not tried again",
            "waiting, most = failed + waiting, max(1, len(wave) // 2)",
            "pass",
            "decoding/test_generate.py::test_a_continuation_that_fits_alone_is_scored",
        ),
    ),
]
