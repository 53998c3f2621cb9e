"""The gate of decode steps (`tests.aot.decode_steps`): reading, judging, printing. `make aot` compiles."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.aot import decode_steps, h200
from tests.aot.decode_steps import MODEL, SINGLE, STACK, STEPS, Limits, StepCost, failures, weight_bytes
from tests.aot.loop_counts import lowered_counts
from tests.aot.thunks import num_driven_by_host

THUNKS = """000: kCopy  [source       | next=002 (2)] kCopy
001: kWhile [prev=002 (1) | sink        ]   \

condition:
    004: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=021 (1)] \

        005: kCustomKernel [source       | sink        ] fusion_6
        006: kConditional [source       | sink        ]
            007: kWhile [source       | sink        ]
condition:
                No thunks.              body:
    008: kConditional [source       | sink        ]
      true_branch:
        009: kWhile [source       | sink        ]
    000: kCommandBuffer [source       | next=021 (1)]
        010: kWhile [source       | sink        ]
011: kWhile [source       | sink        ]
"""
WEIGHTS = weight_bytes(MODEL)
COST = StepCost(5, 2, 0, WEIGHTS, round(0.05 * WEIGHTS), 7, 1.25, 2.5, WEIGHTS)
LIMITS = Limits(launches=5)


def test_what_graphs_hold_is_not_driven_by_the_host():
    assert num_driven_by_host(THUNKS) == 4
    in_one_graph = "000: kCommandBuffer [source | sink]\n" + "\n".join(
        "    " + line for line in THUNKS.splitlines()
    )
    assert num_driven_by_host(in_one_graph) == 0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (dict(launches=6), "6 launches, at most 5"),
        (dict(waits=3), "3 waits, at most 2"),
        (dict(num_driven=1), "1 loops and branches driven by the host, at most 0"),
        (dict(written_bytes=WEIGHTS), "2.0 times the weights moved, at most 1.1"),
    ],
)
def test_a_step_beyond_a_limit_fails(change, found):
    assert failures(COST, LIMITS) == [] and round(COST.traffic, 3) == 1.05
    beyond = dataclasses.replace(COST, **change)
    assert failures(beyond, LIMITS) == [found] and failures(beyond, None) == []


def test_single_layers_and_the_engine_have_limits_and_all_weigh_as_much():
    assert {step.loop for step in STEPS if step.layers == SINGLE} == {step.loop for step in STEPS}
    for step in STEPS:
        assert (step.limits is not None) == (step.layers == SINGLE or step.loop == "engine"), step.name
    single = jax.tree.leaves(decode_steps.decoder_shapes(MODEL, is_stacked=False))
    assert sum(leaf.size * 2 for leaf in single) == WEIGHTS == 2_471_628_800


@pytest.mark.slow
@pytest.mark.parametrize("layers", [STACK, SINGLE])
def test_only_stacked_layers_are_a_loop(layers, monkeypatch):
    model = dataclasses.replace(decode_steps.MODEL, num_layers=3, vocab_size=64, hidden_size=256, mlp_size=64)
    monkeypatch.setattr(decode_steps, "MODEL", model)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=h200.NUM_SMS, platform="cuda")
    for step in (step for step in STEPS if step.layers == layers):
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            traced = jax.jit(step.function).trace(*decode_steps.arguments_of(step))
            counts = lowered_counts(
                traced.lower(lowering_platforms=("cuda",)).compiler_ir(), is_ordinary=True
            )
        assert counts.known_loops == (layers == STACK), step.name


def test_what_is_wrong_is_printed_for_all_steps_at_once(monkeypatch, capsys):
    broken = dataclasses.replace(COST, num_driven=2)

    def costs(_, in_haste):
        assert not in_haste, "docs show the seconds that users wait"
        return iter([broken, ValueError("no such chip")])

    monkeypatch.setattr(decode_steps, "costs", costs)
    monkeypatch.setattr(decode_steps, "STEPS", [step for step in STEPS if step.layers == SINGLE][:2])
    assert decode_steps.main(["--markdown"]) == 1
    head, _, heading, rule, first, second, _, end = capsys.readouterr().out.splitlines()
    assert "2.472 GB" in head and end.startswith("0 passed, 2 failed in")
    assert {line.count("|") for line in (heading, rule, first, second)} == {len(decode_steps.HEADINGS) + 1}
    assert first.startswith(
        "| your own loop | single | 5 | 257 | 2 | 2 | 2,472 | 124 | 1.050 | 1.1 | 7 | 1.2 | 2.5 |"
    )
    assert first.endswith("FAILED: 2 loops and branches driven by the host, at most 0 |")
    assert second.endswith("FAILED: ValueError: no such chip |")
    with pytest.raises(SystemExit):
        decode_steps.main(["nothing"])
