"""The gate of programs compiled for a TPU (`tests.aot.tpu_programs`): judging. `make aot-tpu` compiles."""

import pytest

from tests.aot import tpu_programs
from tests.aot.tpu_programs import OPERATION, TpuCost, failures


def test_a_program_at_its_limits_passes():
    assert failures(OPERATION, OPERATION) == []


@pytest.mark.parametrize(
    ("cost", "found"),
    [
        (TpuCost(4, 2, 0), "4 code bytes, at most 3"),
        (TpuCost(3, 3_000, 0), "3,000 temporary bytes, at most 2"),
        (TpuCost(3, 2, 1), "1 pool copies, at most 0"),
        (TpuCost(3, 2, 0, 5), "5 bytes of host memory not updated in place, at most 0"),
    ],
)
def test_a_program_beyond_a_limit_fails(cost, found):
    assert failures(cost, TpuCost(3, 2)) == [found]


def test_all_operations_and_steps_are_compiled_once():
    programs = [program for program, _ in tpu_programs.tpu_programs()]
    subjects = [program.subject for program in programs if not program.host_bytes]
    steps = {"plain step", "evicting step", "speculative step", "beam step", "rows end"}
    operations = {"extend", "allocate", "commit", "evict", "fork", "free", "attention", "write", "gather"}
    assert steps | operations <= {*subjects}
    assert sorted(subjects) == sorted([*{*subjects}, *["plain step"] * 2])  # by XLA, kernels, a cascade
    with_host = [program for program in programs if program.host_bytes]
    moving = {"extend", "allocate"}
    assert moving | {"prefetch", "commit", "evict", "evicting step", "engine step"} <= {
        program.subject for program in with_host
    }
    assert moving == {program.subject for program in with_host if program.config.snapshot_groups}


def test_what_is_wrong_is_printed_for_all_programs_at_once(monkeypatch, capsys):
    costs = iter([OPERATION, TpuCost(1, 2, pool_copies=3)])
    monkeypatch.setattr(tpu_programs, "compile_for_tpu", lambda _: next(costs))
    assert tpu_programs.main(["truncate", "gather", "fork"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith("ok") and lines[4].endswith("FAILED: 3 pool copies, at most 0")
    assert lines[5].endswith("FAILED: StopIteration:") and lines[-1].startswith("1 passed, 2 failed in")
