"""The command that prints the table of kinds, and the table in docs/measured.md."""

import pathlib

from tests.kinds import table

MEASURED = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "measured.md"


def test_the_table_in_the_documents_is_what_the_command_prints(capsys):
    assert table.main(["--markdown"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 2 + len(table.KINDS)
    assert printed in MEASURED.read_text(), "paste what `python -m tests.kinds.table --markdown` prints"


def test_what_a_token_stores_is_in_the_documents(capsys):
    assert table.main(["--stored"]) == 0
    printed = capsys.readouterr().out
    assert "| `LatentAttention(512, 64)` | 576 | 8.6 |" in printed
    assert printed in MEASURED.read_text(), "paste what `python -m tests.kinds.table --stored` prints"


def test_each_reason_is_printed_with_its_cells(capsys, monkeypatch):
    refused, nothing = table.Refused(ValueError, "got .* and more"), table.NoMeaning("There is none.")
    kinds = (
        table.Kind("one", (table.FULL,), (table.dense,), None, {"commit": refused, "hit": refused}),
        table.Kind("two", (table.FULL,), (table.dense,), None, {"hit": refused, "window": nothing}),
    )
    monkeypatch.setattr(table, "KINDS", kinds)
    assert table.main([]) == 0
    lines = [
        '* commit of one: ValueError, "got ... and more"',
        '* hit of one, two: ValueError, "got ... and more"',
        "* window of two: There is none.",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    table.main(["--markdown"])
    rows = capsys.readouterr().out.splitlines()[2:4]
    assert [row.count("refused") for row in rows] == [2, 1] and rows[1].count("no meaning") == 1
