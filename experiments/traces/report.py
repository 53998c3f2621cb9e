"""The table and the picture of `experiments.traces.replay`."""

from typing import Any

from experiments.common import log_axes
from experiments.common.report import figure, show_provenance
from experiments.common.timing import show_records


def rate(value: float | None) -> str:
    """Four decimals; a dash where there was nothing to hit."""
    return "–" if value is None else f"{value:.4f}"


COLUMNS = {
    "policy": "{policy}",
    "blocks": "{num_blocks:,}",
    "hit rate": lambda record: rate(record["hit_rate_blocks"]),
    "by token": lambda record: rate(record["hit_rate_tokens"]),
    "1st half": lambda record: rate(record["halves"][0]["hit_rate_blocks"]),
    "2nd half": lambda record: rate(record["halves"][1]["hit_rate_blocks"]),
    "evicted": "{num_evictions:,}",
    "time": "{replay_s:.1f} s",
    "compile": "{compile_s:.1f} s",
}


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as a table."""
    trace = report["trace"]
    show_provenance(report)
    title = (
        f"{trace['name']}: {trace['num_requests']:,} requests, {trace['num_ids']:,} blocks, "
        f"{trace['num_distinct']:,} different ones, {trace['num_tokens']:,} tokens"
    )
    show_records(title, COLUMNS, report["records"])


@figure((8, 4), 1, 2, dpi=150, sharex=True, sharey=True)
def draw(report: dict, *panels: Any) -> None:
    """Writes a picture: hit rate by block and by token against the cache's size."""
    policies = dict.fromkeys(record["policy"] for record in report["records"])
    for ax, field, what in zip(
        panels, ("hit_rate_blocks", "hit_rate_tokens"), ("of blocks", "of tokens"), strict=True
    ):
        for policy in policies:
            records = [record for record in report["records"] if record["policy"] == policy]
            sizes = [record["num_blocks"] for record in records]
            ax.plot(
                sizes, [100 * record[field] for record in records], marker="o", markersize=3, label=policy
            )
        ax.set(xscale="log", xlabel="blocks in the cache", title=f"hit rate {what}", ylim=(0, None))
        log_axes.label(ax.xaxis)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("%")
    panels[0].legend(frameon=False, fontsize=8)
    panels[0].figure.suptitle(report["trace"]["name"], fontsize=10)
