"""Records of studies: the code of today shows and draws them, and judges them as they were judged."""

import importlib

import pytest

for package in ("flax", "matplotlib", "optax", "rich"):
    pytest.importorskip(package)

SHOWN = {
    "agents": "agents",
    "bookkeeping": "bookkeeping.__main__",
    "evaluate": "evaluate.__main__",
    "learned_prefix": "learned_prefix",
    "shared_prefix": "shared_prefix",
}
DRAWN = {
    "chunks": "chunks.report",
    "compression": "compression",
    "decode_speed": "decode_speed.report",
    "fleet": "fleet.__main__",
    "hybrid": "hybrid.__main__",
    "quantised": "quantised",
    "rollouts": "rollouts.__main__",
    "serve": "serve.report",
    "streaming": "streaming",
    "tiers": "tiers.report",
}
JUDGED = {
    "chunks": lambda bars_of, found: bars_of(found["texts"], found["trace"]),
    "compression": lambda bars_of, found: bars_of(found),
    "evaluate": lambda bars_of, found: bars_of(found["tasks"]),
    "hybrid": lambda bars_of, found: bars_of(found),
    "quantised": lambda bars_of, found: bars_of(found | {"head_dim": 64}),
    "rollouts": lambda bars_of, found: bars_of(found["ways"], found["sharing"], found["sizes"]["group"]),
    "streaming": lambda bars_of, found: bars_of(found),
}
"""Studies whose record has all that their bars are made of."""


@pytest.mark.parametrize("name", [*SHOWN, *DRAWN])
def test_a_record_is_shown_and_judged_as_it_was(name, capsys, tmp_path, recorded):
    record = recorded(name)
    module = importlib.import_module(f"experiments.{(SHOWN | DRAWN)[name]}")
    module.show(record)
    num_failed = sum(not bar["holds"] for bar in record["bars"])
    said = capsys.readouterr().out
    assert f"{num_failed} of {len(record['bars'])} bars do not hold" in said and " -0.0 " not in said
    if name in DRAWN:
        module.draw(record, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000
    if name in JUDGED:
        assert JUDGED[name](module.bars_of, record) == record["bars"]
