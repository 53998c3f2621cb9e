"""Mutations of the study of the engine at work; see `mutations`."""

from tests.mutants.kernel_speed import in_benchmark

TESTS = "experiments/test_serve.py"
STATIC = f"{TESTS}::test_static_batches_wait_for_their_longest_and_begin_with_the_shortest_prompts"
LATER = f"{TESTS}::test_who_comes_later_is_not_served_before_and_idle_time_is_skipped"
COSTS = f"{TESTS}::test_a_step_takes_the_longer_of_bytes_and_flops"
TURNS = f"{TESTS}::test_deliveries_are_timed_in_turns"
METRICS = f"{TESTS}::test_prometheus_text_has_the_names_of_vllm"
VERDICTS = f"{TESTS}::test_verdicts_can_be_either"
PROMPTS = f"{TESTS}::test_prompts_are_taken_as_they_are_and_answers_by_their_factors"

MUTATIONS = [
    *in_benchmark(
        "serve/server",
        ("batches of the longest prompts", "key=lambda i: len(", "key=lambda i: -len(", STATIC),
        ("batches do not wait", "if self.engine.num_unfinished:\n", "if False:\n", STATIC),
        ("all requests come at once", ".arrival <= now", ".arrival <= now + 1e9", LATER),
    ),
    *in_benchmark(
        "serve/machines",
        ("the shorter of two times", "return max(num_bytes", "return min(num_bytes", COSTS),
        ("keys and values are not read", "+ num_held * self.bytes", "+ 0 * num_held * self.bytes", COSTS),
    ),
    *in_benchmark(
        "serve/interference",
        ("what was under way counts", "before = server.step()", "before = server.clock.now()", TURNS),
    ),
    *in_benchmark(
        "serve/prometheus",
        ("tokens that were found are not asked for", "cached + computed)", "computed)", METRICS),
    ),
    *in_benchmark(
        "common/report",
        ("every bar holds", "bool(measured <= limit)", "bool(measured <= limit + 9)", VERDICTS),
    ),
    *in_benchmark(
        "serve/workload",
        ("arrivals as they are", "answer.arrival * arrivals", "answer.arrival", PROMPTS),
    ),
]
