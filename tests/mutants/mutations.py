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


# Tests that several files name.
PADDING = "operations/test_cases.py::test_case_g_padding_and_idle_rows_write_nowhere"
MAX_LEN = "operations/test_cases.py::test_case_h_row_at_max_seq_len[244]"
FORK = "operations/test_sharing_cases.py::test_case_i_fork_takes_no_block"
RESERVED = "operations/test_sharing_cases.py::test_case_i_reserved_blocks_stay_with_the_source"
BRANCHES = "operations/test_sharing_cases.py::test_case_k_three_branches_of_one_row"
SPARE_BLOCK = "operations/test_sharing_cases.py::test_case_ee_three_writers_and_one_spare_block[3]"
FAILED_ROW = "operations/test_failures.py::test_a_failed_row_changes_nothing"
ALL_AT_ONCE = "operations/test_failures.py::test_all_rows_at_once_fail_alone"
COPY_NEEDS_BLOCK = "operations/test_failures.py::test_a_copy_needs_a_block_too"
ROW_FIELDS = "operations/test_rows.py::test_priority_namespace_and_recency_follow_the_rows"
FIGURES = "operations/test_stats.py::test_figures"
GATHER = "attention/test_gather.py::test_gather_is_zero_where_no_token_is"
INVARIANTS = "inspect/test_check_invariants.py::test_broken_rows_and_blocks_are_found"

WINDOWS = "operations/test_windows.py"
BOUNDED = f"{WINDOWS}::test_long_prompt_and_long_decode_in_a_bounded_pool"
ROLLBACK = f"{WINDOWS}::test_truncate_within_the_rollback_then_decode[1-2]"

DENSE = "attention/test_attention_blind.py::test_attention_against_dense_float64"
PACKED = f"{DENSE}[float32-2-8-4-7-None-False-None-None-True-True]"
GROUPED_HEADS = f"{DENSE}[float32-8-8-16-3-None-False-2.5-0.3-True-False]"

PREFIX_SCRIPT = "prefix/test_prefix_scripts.py::test_a_short_random_script"
