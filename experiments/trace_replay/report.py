"""The table and the picture of `experiments.trace_replay`."""

from pathlib import Path

from experiments.common import log_axes
from experiments.common.timing import show_table


def rate(value: float | None) -> str:
    """Four decimals; a dash where there was nothing to hit."""
    return "–" if value is None else f"{value:.4f}"


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as a table."""
    host, trace = report["machine"], report["trace"]
    print(f"{host['cpu']}, {host['num_cores']} cores; {report['device']}, jax {report['jax']}")
    title = (
        f"{trace['name']}: {trace['num_requests']:,} requests, {trace['num_ids']:,} blocks, "
        f"{trace['num_distinct']:,} different ones, {trace['num_tokens']:,} tokens"
    )
    rows = [
        [
            record["policy"],
            f"{record['num_blocks']:,}",
            rate(record["hit_rate_blocks"]),
            rate(record["hit_rate_tokens"]),
            *(rate(half["hit_rate_blocks"]) for half in record["halves"]),
            f"{record['num_evictions']:,}",
            f"{record['replay_s']:.1f} s",
            f"{record['compile_s']:.1f} s",
        ]
        for record in report["records"]
    ]
    header = [
        "policy",
        "blocks",
        "hit rate",
        "by token",
        "1st half",
        "2nd half",
        "evicted",
        "time",
        "compile",
    ]
    show_table(title, header, rows)


def draw(report: dict, path: Path) -> None:
    """Writes a picture: hit rate by block and by token against the cache's size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
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
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("%")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(report["trace"]["name"], fontsize=10)
    figure.savefig(path, dpi=150)
