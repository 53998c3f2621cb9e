"""The tables and the figure of `experiments.decode_speed`."""

from collections.abc import Sequence
from typing import Any

from experiments.common import log_axes
from experiments.common.report import figure, framed
from experiments.common.timing import number, show_records, spread_columns
from experiments.decode_speed.memory import BLOCK_SIZE, NUM_DRAWS, NUM_ROWS
from experiments.decode_speed.sides import ALONE, BATCHES, DENSE, FILLS, FULL, NUM_STEPS, PAGED, SHORT, Case

DENSE_PADDED = "dense, as long as the longest row"


@framed
def show(report: dict) -> None:
    model = report["model"]
    print(f"{model['checkpoint']}: {model['num_parameters']:,} parameters, float32; times in milliseconds")
    for case in (FULL, SHORT):
        _show_case(case, report["records"])
    _show_sweep(report["records"])
    _show_memory(report["memory"])


def medians_ms(records: Sequence[dict], case: Case) -> dict[str, float]:
    return {
        record["side"]: record["median_us"] / 1e3 for record in records if record["case"]["name"] == case.name
    }


def _show_case(case: Case, records: Sequence[dict]) -> None:
    medians = medians_ms(records, case)

    def share(record: dict) -> str:
        if record["side"] not in (PAGED, *DENSE):
            return ""
        return f"{1 - medians[ALONE] / medians[record['side']]:.0%}"

    columns = {
        "side": "{side}",
        **spread_columns(1e3),
        "calls": "{num_calls}",
        "attention's share": share,
        "first call (compiles)": "{first_call_s:.1f} s",
    }
    of_case = [record for record in records if record["case"]["name"] == case.name]
    show_records(f"a decode step, {case.name}; {NUM_STEPS} steps in a loop", columns, of_case)


def _show_sweep(records: Sequence[dict]) -> None:
    names = dict.fromkeys(record["case"]["name"] for record in records)
    sweep = [{"rows": name} | medians_ms(records, Case(name, 0, ())) for name in names]
    columns = {
        "rows": "{rows}",
        **{side: lambda ms, side=side: number(ms[side]) for side in (PAGED, *DENSE)},
        "paged / better dense": lambda ms: f"{ms[PAGED] / min(ms[side] for side in DENSE):.2f}x",
    }
    show_records("a decode step in a loop, by fill and batch", columns, sweep)


PADDING = {
    "": lambda record: f"blocks of {record['block_size']}" if record["block_size"] else DENSE_PADDED,
    "median": "{median:.2%}",
    "range": "{least:.2%} - {most:.2%}",
}
SHARING = {
    "samples of a prompt, prompt's blocks + own": (
        "{num_samples} samples, {prompt_blocks} + {own_blocks} blocks"
    ),
    "blocks": "{blocks_used}",
    "saved": "{saved:.2%}",
    "p(n-1) / n(p+g)": "{closed_form:.2%}",
}


def _show_memory(memory: dict) -> None:
    if memory["skipped"]:
        print(f"\nslots without a token: skipped, {memory['skipped']}")
    if memory["padding"]:
        title = f"slots without a token, {NUM_ROWS} rows of Azure conversations, {NUM_DRAWS} draws"
        show_records(title, PADDING, memory["padding"])
    show_records(f"sharing a prompt, blocks of {BLOCK_SIZE}", SHARING, memory["sharing"])


@figure((11, 8), 2, 2)
def draw(report: dict, by_fill: Any, by_batch: Any, padding: Any, sharing: Any) -> None:
    records, measured = report["records"], {record["case"]["name"] for record in report["records"]}
    colors = dict(zip((PAGED, *DENSE, ALONE), ("C0", "C1", "C3", "0.6"), strict=True))

    def plot(axes, cases: Sequence[Case], place, title: str, label: str, sides=(PAGED, *DENSE)) -> None:
        cases = sorted((case for case in cases if case.name in measured), key=place)
        for side in sides:
            points = [(place(case), medians_ms(records, case).get(side)) for case in cases]
            points = [(x, y) for x, y in points if y is not None]
            axes.plot(*zip(*points, strict=True), "o-", color=colors[side], label=side, markersize=4)
        axes.set(xscale="log", yscale="log", title=title, xlabel=label, ylabel="milliseconds per step")
        axes.set_xticks([place(case) for case in cases], [f"{place(case):,}" for case in cases])
        axes.minorticks_off()
        axes.legend(frameon=False)

    title = f"{len(FULL.lens)} rows in a table of {FULL.table_len:,}"
    plot(by_fill, [*FILLS, FULL], lambda case: case.lens[0], title, "tokens that each row holds")
    alone = medians_ms(records, FULL)[ALONE]
    by_fill.axhline(alone, color=colors[ALONE], linestyle="--", label=ALONE)
    by_fill.legend(frameon=False)
    title = f"rows full, {FULL.table_len:,} tokens each"
    plot(by_batch, [*BATCHES, FULL], lambda case: len(case.lens), title, "rows")
    for axes in (by_fill, by_batch):
        log_axes.label(axes.yaxis)

    paged = [record for record in report["memory"]["padding"] if record["block_size"]]
    if paged:
        (dense,) = (record for record in report["memory"]["padding"] if not record["block_size"])
        sizes = [record["block_size"] for record in paged]
        least, median, most = ([100 * record[key] for record in paged] for key in ("least", "median", "most"))
        padding.fill_between(sizes, least, most, color="C0", alpha=0.2)
        padding.plot(sizes, median, "o-", color="C0", label=PAGED)
        padding.axhline(100 * dense["median"], color="C3", label=DENSE_PADDED)
        padding.axhline(4, color="0.6", linestyle="--", label="4%, published for blocks of 16")
        padding.set(xscale="log", xlabel="tokens per block", ylabel="% of the slots")
        padding.set_yscale("symlog", linthresh=0.1)
        padding.set_ylim(0, 100)
        percent = [0, 0.1, 1, 10, 100]
        padding.set_yticks(percent, [f"{share:g}" for share in percent])
        padding.set_xticks(sizes, [str(size) for size in sizes])
        padding.minorticks_off()
        padding.legend(frameon=False)
    else:
        padding.text(0.5, 0.5, "skipped: no trace", ha="center", transform=padding.transAxes)
    padding.set_title(f"slots without a token, {NUM_ROWS} conversations")

    prompts = dict.fromkeys((r["prompt_blocks"], r["own_blocks"]) for r in report["memory"]["sharing"])
    for color, (prompt_blocks, own_blocks) in zip(("C0", "C1", "C2"), prompts, strict=True):
        rows = [r for r in report["memory"]["sharing"] if r["prompt_blocks"] == prompt_blocks]
        samples = [r["num_samples"] for r in rows]
        sharing.plot(samples, [100 * r["closed_form"] for r in rows], "-", color=color)
        label = f"prompt of {prompt_blocks} blocks, {own_blocks} of its own per sample"
        sharing.plot(samples, [100 * r["saved"] for r in rows], "o", color=color, label=label)
    sharing.set(xlabel="samples of a prompt", ylabel="% of the blocks")
    sharing.set_title("blocks saved (lines: closed form)")
    sharing.legend(frameon=False)
