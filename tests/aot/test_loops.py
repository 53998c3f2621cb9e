"""The gate of loops and launches (`tests.aot.loops`): counting, judging, printing. `make aot` compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.aot import loops
from tests.aot.loop_counts import LoopCounts, compiled_counts, lowered_counts, step_counts
from tests.aot.program import Limits
from tests.aot.program_cost import ProgramCost, all_programs, failures, lower
from tests.aot.table import Table

HLO = """
HloModule jit_step, entry_computation_layout={(s32[8]{0})->s32[8]{0}}

%fused_add (param_0: s32[8]) -> s32[8] {
  %param_0 = s32[8]{0} parameter(0)
  ROOT %add.1 = s32[8]{0} add(%param_0, %param_0)
}

%row_body (p.0: (s32[], s32[8])) -> (s32[], s32[8]) {
  %p.0 = (s32[], s32[8]{0}) parameter(0)
  %gte.0 = s32[8]{0} get-tuple-element(%p.0), index=1
  %fusion.1 = s32[8]{0} fusion(%gte.0), kind=kLoop, calls=%fused_add
  %fusion.2 = s32[8]{0} fusion(%fusion.1), kind=kLoop, calls=%fused_add
  ROOT %tuple.1 = (s32[], s32[8]{0}) tuple(%gte.0, %fusion.2)
}

%branch_0 (p.1: s32[8]) -> s32[8] {
  ROOT %p.1 = s32[8]{0} parameter(0)
}

%branch_1 (p.2: s32[8]) -> s32[8] {
  %p.2 = s32[8]{0} parameter(0)
  ROOT %sort.1 = s32[8]{0} sort(%p.2), dimensions={0}, to_apply=%compare
}

%graph (p.3: s32[8]) -> s32[8] {
  %p.3 = s32[8]{0} parameter(0)
  %copy-start.1 = (s32[8]{0}, s32[8]{0}, u32[]) copy-start(%p.3)
  ROOT %copy-done.1 = s32[8]{0} copy-done(%copy-start.1)
}

%outer_body (p.4: (s32[], s32[8])) -> (s32[], s32[8]) {
  %p.4 = (s32[], s32[8]{0}) parameter(0)
  %while.1 = (s32[], s32[8]{0}, /*index=2*/s32[8]{0}) while(%p.4), condition=%c.1, body=%row_body, \
backend_config={"known_trip_count":{"n":"8"},"known_init_step":{"init":"0","step":"1"}}
  %gte.1 = s32[8]{0} get-tuple-element(%while.1), index=1
  %conditional.1 = s32[8]{0} conditional(%gte.2, %gte.1, %gte.1), branch_computations={%branch_0, %branch_1}
  %call.1 = s32[8]{0} call(%gte.1), to_apply=%graph
  ROOT %tuple.2 = (s32[], s32[8]{0}) tuple(%gte.1, %call.1)
}

ENTRY %main.1 (x.1: s32[8]) -> s32[8] {
  %x.1 = s32[8]{0} parameter(0)
  %while.2 = (s32[], s32[8]{0}) while(%x.1), condition=%c.2, body=%outer_body
  %custom-call.1 = s32[8]{0} custom-call(%while.2), custom_call_target="mosaic_gpu_v2"
  ROOT %bitcast.1 = s32[8]{0} bitcast(%custom-call.1)
}
"""
ROWS, NUMBER = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
COUNTED = (
    "extend_2_groups",
    "allocate_2_groups",
    "commit_2",
    "evict_2",
    "lookup_2",
    "fork_2_groups_i",
    "free_2_groups_i",
)
LIMITS = Limits(2, known_loops=1, launches=5, temporary_bytes=7)
COST = ProgramCost(LoopCounts(loops=1, conditionals=1, known_loops=1, launches=5), 0, temporary_bytes=7)


def test_a_compiled_program_is_counted():
    """Of a row's loop eight trips; of a choice the larger branch; of a copy its start."""
    body = 8 * 2 + 1 + 1
    counts = LoopCounts(loops=1, conditionals=1, known_loops=1, launches=1, trip_launches=body)
    assert compiled_counts(HLO) == counts
    opened = dataclasses.replace(counts, launches=1 + body, trip_launches=0)
    # Of each 32 bytes; the copy's result has a number beside the copy.
    opened = dataclasses.replace(opened, read_bytes=32 * body, written_bytes=32 * body + 4)
    assert compiled_counts(HLO, is_loop=True) == opened
    assert step_counts(HLO) == dataclasses.replace(opened, loops=0, launches=body)
    with pytest.raises(ValueError, match="expected the text of a compiled program with an ENTRY, got 'body'"):
        compiled_counts("body")


def test_loops_in_a_loop_of_known_trips_count_at_each_trip():
    unknown = HLO.replace('"known_trip_count"', '"other"').replace(
        "while(%x.1), condition=%c.2, body=%outer_body",
        'while(%x.1), condition=%c.2, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}',
    )
    counts = compiled_counts(unknown)
    assert (counts.loops, counts.conditionals, counts.waits, counts.known_loops) == (3, 3, 6, 1)
    assert (counts.launches, counts.trip_launches) == (3 * 2 + 1, 3 * 2)


def _scan(x):
    return lax.scan(lambda carry, row: (carry + row, carry), jnp.int32(0), x)


def _until_zero(x):
    """Counts down to a constant from what only data say."""
    return lax.while_loop(lambda n: n > 0, lambda n: n - 1, x[0])


def _doubled(x):
    """Compares with a constant a number that does not count one by one."""
    return lax.while_loop(lambda n: n < 100, lambda n: 2 * n, jnp.int32(1) + 0 * x[0])


def _up_to(x):
    return lax.fori_loop(0, x[0], lambda _, n: n + 1, jnp.int32(0))


def _from(x):
    """Counts one by one up to a constant, from what only data say."""
    return lax.while_loop(lambda n: n < 5, lambda n: n + 1, x[0])


def _choice(x):
    return lax.cond(x[0] > 0, lambda: _until_zero(x), lambda: jnp.int32(0))


def _by_platform(x):
    return lax.platform_dependent(x, cpu=_until_zero, default=lambda x: x[0])


def _nested(x):
    return lax.scan(lambda carry, row: (carry + _until_zero(row[None]), None), jnp.int32(0), x)[0]


def _called_twice(x):
    inner = jax.jit(_up_to)
    return inner(x) + inner(x + 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_scan, (0, 0, 1)),
        (_until_zero, (1, 0, 0)),
        (_doubled, (1, 0, 0)),
        (_up_to, (1, 0, 0)),
        (_from, (1, 0, 0)),
        (_choice, (1, 1, 0)),
        (_by_platform, (0, 0, 0)),
        (_nested, (8, 0, 1)),
        (_called_twice, (2, 0, 0)),
    ],
)
def test_a_lowered_program_is_counted(function, expected):
    lowered = jax.jit(function).trace(ROWS).lower(lowering_platforms=("cuda",))
    counts = lowered_counts(lowered.compiler_ir())
    assert (counts.loops, counts.conditionals, counts.known_loops) == expected


def test_a_program_at_its_limits_passes():
    assert failures(COST, LIMITS) == []
    assert failures(dataclasses.replace(COST, pool_copies=None, temporary_bytes=None), LIMITS) == []
    assert failures(COST, Limits(2)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (dict(counts=LoopCounts(loops=2, conditionals=1)), "3 waits for the host, at most 2"),
        (dict(counts=LoopCounts(known_loops=2)), "2 loops of known trips, at most 1"),
        (dict(counts=LoopCounts(launches=6)), "6 launches, at most 5"),
        (dict(temporary_bytes=8_000), "8,000 temporary bytes, at most 7"),
        (dict(pool_copies=1), "1 pool copies, at most 0"),
        (dict(moved_host_bytes=4), "4 bytes of host memory not updated in place, at most 0"),
    ],
)
def test_a_program_beyond_a_limit_fails(change, found):
    assert failures(dataclasses.replace(COST, **change), LIMITS) == [found]


def test_the_waits_allowed_are_those_of_the_design():
    """G groups: 1 + G; 1 + 2G; 1 + G; 1 + 2G; 0. Another policy: one more for each group that evicts."""
    allowed = {program.name: program.limits.waits for program in all_programs()}
    assert [allowed[f"extend_{groups}"] for groups in ("1_group", "2_groups")] == [2, 3]
    for policy, of_one, of_two in (("lru", (3, 2, 3), (5, 3, 5)), ("hyperbolic", (4, 2, 4), (7, 3, 7))):
        for groups, expected in (("1_group", of_one), ("2_groups", of_two)):
            names = [f"{name}_{groups}_index_{policy}" for name in ("extend", "commit", "allocate")]
            assert tuple(allowed[name] for name in names) == expected
    # A host tier adds no wait while nothing moves, but for the question whether it has a part of a prompt.
    for groups in ("1_group", "2_groups"):
        for name, more in (("extend", 0), ("commit", 0), ("allocate", 1)):
            name = f"{name}_{groups}_index_lru"
            assert allowed[f"{name}_host"] == allowed[name] + more
    for name in ("evicting_step_index_lru", "engine_step_ordinary_attention_by_kernels"):
        assert allowed[f"{name}_host"] == allowed[name]
    rows = ("fork", "free", "truncate", "reorder", "touch", "set_priority")
    assert {allowed[f"{name}_{cache}"] for name in rows for cache in ("1_group", "2_groups_index_lru")} == {0}
    assert len(allowed) == len(all_programs())


def test_what_is_wrong_is_printed_for_all_programs_at_once(monkeypatch, capsys):
    programs = [program for program in all_programs() if program.subject == "gather"]
    assert len(programs) == 2
    monkeypatch.setattr(loops, "costs", lambda *_: iter([COST, ValueError("no such chip")]))
    assert loops.main(["gather_1_group", "gather_2_groups", "--markdown"]) == 1
    *lines, end = capsys.readouterr().out.splitlines()[2:]
    assert end.startswith("0 passed, 2 failed in")
    heading, rule, first, second, _ = lines
    assert {line.count("|") for line in (heading, rule, first, second)} == {len(loops.HEADINGS) + 1}
    assert first.startswith("| gather | 1 group | 1 | 1 | 0 | 1 | 5 | 0 | 0 | 7 | FAILED: 2 waits")
    assert second.endswith("FAILED: ValueError: no such chip |")
    with pytest.raises(SystemExit):
        loops.main(["nothing"])


def test_a_table_is_aligned():
    table = Table(("what", "number", "verdict"), [["extend", "fork"]], is_markdown=False)
    assert table.head() == "what       number  verdict"
    assert table.line(["fork", 12_345, "ok"]) == "fork       12,345  ok"
    assert table.line(["extend", None, "a\nb"]) == "extend             a b"


@pytest.mark.slow
def test_operations_wait_for_the_host_no_more_than_allowed():
    """Before XLA simplifies, which so far changed no count. Two groups have all that one has."""
    programs = [program for program in all_programs() if program.name.startswith(COUNTED)]
    assert len(programs) >= 12
    found = {program.name: failures(lower(program), program.limits) for program in programs}
    assert not any(found.values()), found
