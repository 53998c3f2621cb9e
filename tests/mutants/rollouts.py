"""Mutations of what samples for training and evaluation; see `mutations`."""

from tests.mutants.kernel_speed import in_benchmark

ROLLOUTS, EVALUATE = "experiments/test_rollouts.py", "experiments/test_evaluate.py"
DRAWN = f"{ROLLOUTS}::test_answers_are_drawn_behind_their_prompt_and_end"
SHORT_POOL = f"{ROLLOUTS}::test_a_pool_that_is_short_makes_no_numbers"
SAME = f"{ROLLOUTS}::test_shared_and_apart_are_the_same"
LOSS = f"{ROLLOUTS}::test_the_loss_is_clipped_and_counts_tokens_of_answers_alone"
GROUP = f"{ROLLOUTS}::test_an_answer_counts_by_what_it_is_above_its_group"
EVENTS = f"{ROLLOUTS}::test_a_group_takes_answers_as_they_come"
CUT = f"{EVALUATE}::test_results_go_on_and_a_line_that_was_cut_is_taken_off"
OTHERS = f"{EVALUATE}::test_another_runs_results_are_refused"
SHARED = f"{EVALUATE}::test_items_of_a_task_share_its_prefix_and_nothing_else"
RIGHT = f"{EVALUATE}::test_the_right_choice_is_the_problems_own"
SCORED = f"{EVALUATE}::test_choices_are_scored_behind_their_context_and_the_prefix_is_computed_once[0]"

MUTATIONS = [
    *in_benchmark(
        "rollouts/sampling",
        ("answers go on behind their end", "is_open &= token != STOP", "is_open &= token >= 0", DRAWN),
        (
            "all rows draw behind the first prompt",
            "jnp.repeat(logits, group_size, axis=0)",
            "jnp.tile(logits, (group_size, 1))",
            DRAWN,
        ),
        (
            "an answer is scored one token late",
            "tokens = rollouts.tokens[:, :-1]",
            "tokens = rollouts.tokens[:, 1:]",
            SAME,
        ),
        ("a short pool is not noticed", "jnp.where(is_ok, logprobs, jnp.nan)", "logprobs", SHORT_POOL),
    ),
    *in_benchmark(
        "rollouts/training",
        ("what is worse is clipped too", "gain = jnp.minimum(", "gain = jnp.maximum(", LOSS),
        ("rewards count as they are", "groups - groups.mean(axis=1, keepdims=True)", "groups", GROUP),
    ),
    *in_benchmark(
        "rollouts/partial",
        (
            "events overwrite what came before",
            "slice(begin, begin + len(event.tokens))",
            "slice(0, len(event.tokens))",
            EVENTS,
        ),
    ),
    *in_benchmark(
        "evaluate/results",
        ("a line that was cut stays", "os.truncate(path, sum(map(len, lines[:-1])))", "pass", CUT),
        ("another run's results are taken", "entries[0] != settings", "entries[0] == 3", OTHERS),
    ),
    *in_benchmark(
        "evaluate/items",
        ("a prefix ends within a block", '+ b"\\n" * padding', '+ b""', SHARED),
        ("the first choice is always right", "answers.insert(right, answers.pop(0))", "pass", RIGHT),
    ),
    *in_benchmark(
        "evaluate/scoring",
        ("nobody computes the prefix first", "cached.score(task.prefix, [])", "pass", SCORED),
    ),
]
