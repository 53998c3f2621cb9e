"""Question: are the kernels right on this GPU, and how fast is what is built on them?

Command: python -m experiments.first_gpu_run [--minutes 6] [--only PART] [--output DIR] [--json]
         python -m experiments.first_gpu_run --interpret --output DIR  on a CPU, tiny, no times
Machine: one NVIDIA Hopper GPU with nothing else on it; results/first_gpu_run_<device>.json
Answer:  not yet measured.

For a quarter of an hour on a GPU that one may not get again: the parts that are worth most come first, each
in a process of its own that is killed when its time is over, and what a part finds is on disk as soon as it
is found. First all named shapes of all kernels against their references; then whole decode steps of the shape
of Llama-3.2-1B, with its layers in a stack and in a tuple, as XLA runs them by default, with loops in one
CUDA graph, and with the two flags that read stacked weights once; then `generate` and the engine; then
`experiments.kernel_speed`, which compares kernels with peers and with the memory's bandwidth.

The verdict names device, driver, jax and the digest of the kernels' sources, and says of each kernel whether
all of its shapes were right. A whole run keeps it in the folder that KVCACHE_JAX_VERDICTS names, by default
in the user's cache folder, where `implementation=None` finds it. The figures belong into
pallas_kernels/NOTES.md in the order of the tables.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiments.common import command
from experiments.common.timing import show_records
from experiments.kernel_speed.timing import CHECKED, MEASURED
from kvcache_jax.core.backends import MOSAIC_GPU
from kvcache_jax.core.verdicts import verdict_folder
from pallas_kernels.versions import digest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "experiments" / "results"
ONE_GRAPH = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1"
WEIGHTS_ONCE = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
ENDED, OVER = "ended", "its time was over"


class Part(NamedTuple):
    """A process, or several at once that share the work.

    Attributes:
      name: For `--only`.
      title: As printed.
      arguments: Of `python -m`.
      limit_s: Seconds.
      flags: Of XLA, on GPUs.
      num_processes: More than one where nothing is timed: what one of them loses is not lost to the others.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    limit_s: float
    flags: str = ""
    num_processes: int = 1


_PARTS = "experiments.first_gpu_run.parts"
PARTS = (
    Part("kernels", "kernels against their references", (_PARTS, "kernels"), 75, num_processes=8),
    Part("stack", "step, layers in a stack", (_PARTS, "stack"), 50),
    Part("tuple", "step, layers in a tuple", (_PARTS, "tuple"), 50),
    Part("one graph", "step, layers in a tuple, loops in one graph", (_PARTS, "tuple"), 50, ONE_GRAPH),
    Part("two flags", "step, layers in a stack, weights read once", (_PARTS, "stack"), 50, WEIGHTS_ONCE),
    Part("serving", "generate and the engine", (_PARTS, "serving"), 60),
    Part("speed", "kernels beside peers", ("experiments.kernel_speed", "--quick", "--json"), 100),
)
KERNELS = {"decode": "paged_decode", "merge": "merge_attention", "append": "append_kv"} | {
    name: f"{name}_blocks" for name in ("gather", "scatter", "copy")
}
"""By the first word of what is checked."""


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.first_gpu_run", __doc__)
    add = parser.add_argument
    add(
        "--minutes",
        type=command.number(0, is_above=True),
        default=6.0,
        metavar="N",
        help="default %(default)g",
    )
    add("--only", action="append", choices=[part.name for part in PARTS], default=[], help="repeatable")
    add("--interpret", action="store_true", help="tiny, on the CPU: everything but the times")
    add("--output", type=command.folder, metavar="DIR", help="default: experiments/results")
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.interpret and options.output is None:
        parser.error(
            "got --interpret without --output, expected a folder: nothing measured goes to the results"
        )
    report = measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0 if report["verdict"]["is_right"] else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts, as far as there is time; the report is on disk after each."""
    end = time.monotonic() + 60 * options.minutes
    report: dict[str, Any] = {"is_interpreted": options.interpret, "code": digest(), "parts": []}
    report["verdict"] = verdict(report)
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        left_s = end - time.monotonic()
        limit_s = min(left_s, part.limit_s) if not options.interpret else left_s
        if limit_s > 0:
            report["parts"].append(run_part(part, options, limit_s))
            report["verdict"] = verdict(report)
            save(report, options.output or RESULTS)
    if not options.only and not options.interpret:
        keep(report["verdict"])
    return report


def run_part(part: Part, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Runs one part for at most `limit_s` seconds, and collects what it printed until then."""
    flags = "" if options.interpret else part.flags
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    arguments = [*part.arguments, *["--interpret"] * options.interpret]
    start = time.monotonic()
    folder = options.output or RESULTS
    if part.name == "speed":
        arguments += ["--output", str(folder), "--minutes", f"{max(limit_s - 15, 1) / 60:.2f}"]
    count = 1 if options.interpret else part.num_processes
    shares = [["--share", f"{nth}/{count}"] for nth in range(count)] if count > 1 else [[]]
    slug = part.name.replace(" ", "_")
    with contextlib.ExitStack() as stack:
        running = []
        for nth, share in enumerate(shares):
            printed = folder / f"first_gpu_run_{slug}_{nth}.unfinished"
            out, said = (
                stack.enter_context(printed.open("w")),
                stack.enter_context(tempfile.TemporaryFile("w+")),
            )
            command_line = [sys.executable, "-m", *arguments, *share]
            process = subprocess.Popen(
                command_line, stdout=out, stderr=said, env=environment, text=True, start_new_session=True
            )
            running.append((process, printed, said))
        ends = [
            _end(process, printed, said, limit_s - (time.monotonic() - start))
            for process, printed, said in running
        ]
    failed = [(how, said) for how, said, _ in ends if how != ENDED]
    how, said = failed[0] if failed else (ENDED, "")
    return {
        "name": part.name,
        "title": part.title,
        "flags": flags,
        "how": how,
        "seconds": time.monotonic() - start,
        "said": said,
        "found": [json.loads(line) for *_, lines in ends for line in lines if line[:1] + line[-1:] == "{}"],
    }


def _end(
    process: subprocess.Popen, printed: Path, said: IO[str], limit_s: float
) -> tuple[str, str, list[str]]:
    """Waits for a process, at most so long: how it ended, its last words, the lines that it printed."""
    try:
        status = process.wait(max(limit_s, 0))
        how = f"ended with exit status {status}" if status else ENDED
    except subprocess.TimeoutExpired:
        how = OVER
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait(10)  # it may hang in the driver
    said.seek(0)
    lines = printed.read_text().splitlines()
    printed.unlink()
    return how, said.read()[-2000:], lines


def records_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists the sides of all contests, each with its part's title and its contest's name."""
    records = []
    for part in report["parts"]:
        for found in part["found"]:
            for contest in [found] if "sides" in found else _entries(found):
                shared = {"part": part["title"], "name": contest["name"], "num_bytes": contest["num_bytes"]}
                records += [shared | record for record in contest["sides"]]
    return records


def _entries(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists what a report of `experiments.kernel_speed` has."""
    return [entry for kind in ("entries", "decodes", "moves", "steps") for entry in found.get(kind, [])]


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """Says where this was, and of each kernel whether all its shapes were right; None if none was tried."""
    environments = [
        found.get("environment", found)
        for part in report["parts"]
        for found in part["found"]
        if "environment" in found or "device" in found
    ]
    where = environments[0] if environments else {}
    ours = [record for record in records_of(report) if record["is_ours"]]
    kernels: dict[str, bool | None] = dict.fromkeys(KERNELS.values())
    for record in ours:
        kernel = KERNELS.get(re.split(r"[: ]", record["name"])[0])
        if kernel is not None:
            is_right = record["status"] in (CHECKED, MEASURED)
            kernels[kernel] = is_right and kernels[kernel] is not False
    all_right = bool(ours) and all(record["status"] in (CHECKED, MEASURED) for record in ours)
    is_right = all_right and all(part["how"] == ENDED for part in report["parts"])
    return {
        "implementation": MOSAIC_GPU,
        "device": where.get("device"),
        "jax": where.get("jax"),
        "code": report["code"],
        "kernels": kernels,
        "is_right": is_right,
        "passed": is_right and all(kernels.values()) and not report["is_interpreted"],
    }


def save(report: dict[str, Any], folder: Path) -> None:
    """Writes the report, whole or not at all."""
    slug = _slug(report["verdict"]) + "_interpreted" * report["is_interpreted"]
    _write(report, folder / f"first_gpu_run_{slug}.json")


def keep(found: dict[str, Any]) -> None:
    """Writes a verdict to where `implementation=None` looks for it, in place of one on the same code."""
    if found["device"]:
        folder = verdict_folder()
        folder.mkdir(parents=True, exist_ok=True)
        _write(
            found, folder / f"{_slug(found)}_{found['implementation']}_{found['jax']}_{found['code']}.json"
        )


def _slug(found: dict[str, Any]) -> str:
    device = (found["device"] or {}).get("name", "no device").lower()
    return re.sub(r"[^a-z0-9]+", "_", device).strip("_")


def _write(content: dict[str, Any], path: Path) -> None:
    unfinished = path.with_suffix(".json.unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


COLUMNS = {
    "": "{name}",
    "side": "{side}",
    "verdict": "{status}",
    "error": "{error}",
    "us": "{us}",
    "GB/s": "{gb_per_s}",
    "first call, s": "{first}",
}


def show(report: dict[str, Any]) -> None:
    """Prints a table per part, then the verdict."""
    for part in report["parts"]:
        records = [_printed(each) for each in records_of({"parts": [part]})]
        show_records(f"{part['title']} ({part['seconds']:.0f} s, {part['how']})", COLUMNS, records, 3)
        for each in records:
            if each["reason"]:
                print(f"{each['name']}, {each['side']}: {each['reason']}")
        if part["said"]:
            print(part["said"].strip().splitlines()[-1])
    found = report["verdict"]
    for kernel, is_right in found["kernels"].items():
        print(f"{kernel}: {'not tried' if is_right is None else 'right' if is_right else 'WRONG'}")
    device = found["device"] or {}
    print(
        f"{device.get('name', 'no device')}, driver {device.get('driver')}, jax {found['jax']}, kernels "
        f"{found['code']}: {'all is right' if found['is_right'] else 'not all is right'}"
    )


def _printed(record: dict[str, Any]) -> dict[str, Any]:
    median, error, first = (record[name] for name in ("median_us", "error", "first_call_s"))
    return record | {
        "error": "-" if error is None else f"{error:.1e}",
        "us": "-" if median is None else f"{median:,.0f}",
        "gb_per_s": f"{record['num_bytes'] / median / 1e3:,.0f}" if median and record["num_bytes"] else "-",
        "first": "-" if first is None else f"{first:.0f}",
    }


if __name__ == "__main__":
    command.run(main)
