"""Question: are the kernels right on this GPU, and how fast is what is built on them?

Command: python -m experiments.first_gpu_run [--minutes 6] [--only PART] [--output DIR] [--json]
         python -m experiments.first_gpu_run --only speed --cell "" --minutes 60 [--without SIDE]
         python -m experiments.first_gpu_run --interpret --output DIR  on a CPU, tiny, no times
Machine: one NVIDIA Hopper or Blackwell GPU with nothing else on it; results/first_gpu_run_<device>.json
Answer:  not yet measured.

For a quarter of an hour on a GPU that one may not get again: the parts that are worth most come first, each
in a process of its own that is killed when its time is over, and what a part finds is on disk as soon as it
is found. First all named shapes of all kernels against their references; then whole decode steps of the shape
of Llama-3.2-1B, with its layers in a stack and in a tuple, as XLA runs them by default, with loops in one
CUDA graph, and with the two flags that read stacked weights once; then `generate` and the engine.

Last, speed. First the ceilings: reading only, and copying. Then paged decode, batch {1, 8, 32, 128} x context
{1k, 8k, 32k} x query heads per key/value head {1, 4, 8} x blocks of {16, 64, 128}, 8 key/value heads of 128,
bfloat16, and a few of 8 bits (a handful of all without --cell): ours, its plan made before (as once per
step for all layers) and made again each time, beside every peer that can be imported; and rows whose lengths
or number leave a GPU idle unless they are split. Then the movement of tokens and blocks. A ratio is the
fastest peer's median over ours: above 1 we are faster. GB/s count the keys and values of the rows, each once.

Each side is checked against the float32 reference before it is timed; the sides of a contest take turns in
one process (`on_device.contests`). Who is wrong or cannot run is reported and why. When a process ends, hangs
or loses the device, the side that was at work has failed, and a new process holds the contest again without
it; a side that does so twice is left out of what follows.

The verdict names device, driver, jax and the digest of the kernels' sources, and says of each kernel whether
all of its shapes were right. A whole run keeps it in the folder that KVCACHE_JAX_VERDICTS names, by default
in the user's cache folder, where `implementation=None` finds it. The figures belong into
pallas_kernels/NOTES.md in the order of the tables.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import command
from experiments.common.timing import show_records
from experiments.on_device.comparison import absences, compare, gb_per_s, of_ceiling, percent
from experiments.on_device.comparison import show as show_comparison
from experiments.on_device.contests import CHECKED, FREEING, MEASURED, SIDES
from experiments.on_device.torch_sides import FLASHINFER_DIR
from kvcache_jax.core.backends import MOSAIC_GPU
from kvcache_jax.core.verdicts import verdict_folder
from pallas_kernels.gpus import left_out
from pallas_kernels.versions import digest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
ONE_GRAPH = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1"
WEIGHTS_ONCE = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
ENDED, OVER, REFUSED = "ended", "its time was over", "ended with exit status 2"
LIMIT_S = 120.0
"""What takes longer without a sign never ends; what a side does may be compiling."""
ALLOWED_CRASHES = 2
"""A side is left out of a part then."""


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


_PARTS = "experiments.on_device.parts"
PARTS = (
    Part("kernels", "kernels against their references", (_PARTS, "kernels"), 75, num_processes=8),
    Part("stack", "step, layers in a stack", (_PARTS, "stack"), 50),
    Part("tuple", "step, layers in a tuple", (_PARTS, "tuple"), 50),
    Part("one graph", "step, layers in a tuple, loops in one graph", (_PARTS, "tuple"), 50, ONE_GRAPH),
    Part("two flags", "step, layers in a stack, weights read once", (_PARTS, "stack"), 50, WEIGHTS_ONCE),
    Part("serving", "generate and the engine", (_PARTS, "serving"), 60),
    Part("speed", "kernels beside peers", (_PARTS, "speed"), 100),
)
KERNELS = {
    "decode": "paged_decode",
    "prefill": "paged_prefill",
    "merge": "merge_attention",
    "append": "append_kv",
    "append_scaled": "append_scaled",
} | {name: f"{name}_blocks" for name in ("gather", "scatter", "copy")}
"""By the first word of what is checked."""


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.first_gpu_run", __doc__)
    add = parser.add_argument
    minutes = command.number(0, is_above=True)
    add("--minutes", type=minutes, default=6.0, metavar="N", help="default %(default)g")
    text = "repeatable; they may take all the time, and have a report of their own"
    add("--only", action="append", choices=[part.name for part in PARTS], default=[], help=text)
    text = 'of speed, in place of a handful: all whose names begin so; "" for the whole grid; repeatable'
    add("--cell", action="append", default=[], metavar="NAME", help=text)
    text = f"leave a side out; repeatable; one of: {'; '.join(SIDES)}"
    add("--without", action="append", default=[], metavar="SIDE", help=text)
    text = f"folder with FlashInfer's compiled modules; default: {FLASHINFER_DIR}"
    add("--flashinfer", type=command.folder, default=os.environ.get(FLASHINFER_DIR), metavar="DIR", help=text)
    add("--interpret", action="store_true", help="tiny, on the CPU: everything but the times")
    add("--output", type=command.folder, metavar="DIR", help="default: experiments/results")
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.interpret and options.output is None:
        parser.error(
            "got --interpret without --output, expected a folder: nothing measured goes to the results"
        )
    for side in options.without:
        if side not in SIDES:
            parser.error(f"got --without {side!r}, expected one of: {'; '.join(SIDES)}")
    with parser.refusing():
        report = measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0 if report["verdict"]["is_right"] else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts, as far as there is time; the report is on disk after each."""
    end = time.monotonic() + 60 * options.minutes
    report: dict[str, Any] = {
        "is_interpreted": options.interpret,
        "is_whole": not (options.only or options.cell or options.without),
        "code": digest(),
        "parts": [],
    }
    report["verdict"] = verdict(report)
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        left_s = end - time.monotonic()
        limit_s = left_s if options.interpret or options.only else min(left_s, part.limit_s)
        if limit_s > 0:
            report["parts"].append(run_part(part, options, limit_s))
            (first, *_) = report["parts"]
            if first["how"] == REFUSED and not first["found"]:
                raise command.InputError(first["said"].strip().splitlines()[-1].partition(": ")[2])
            report["verdict"], report["comparison"] = verdict(report), compare(contests_of(report))
            save(report, options.output or RESULTS)
    if report["is_whole"] and not options.interpret:
        keep(report["verdict"])
    return report


def run_part(part: Part, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Runs one part for at most `limit_s` seconds, and collects what it printed until then."""
    start = time.monotonic()
    count = 1 if options.interpret else part.num_processes
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        work = functools.partial(_run_share, part, options, count, start + limit_s)
        shares = [*threads.map(work, range(count))]
    how, said = next(((how, said) for how, said, _ in shares if how != ENDED), (ENDED, ""))
    found = [each for _, _, found in shares for each in found]
    names = [name for each in found for name in each.get("names", ())]
    return {
        "name": part.name,
        "title": part.title,
        "flags": part.flags,
        "how": how,
        "seconds": time.monotonic() - start,
        "said": said,
        "found": found,
        "left_out": [name for name in names if name not in {each.get("name") for each in found}],
    }


def _run_share(
    part: Part, options: argparse.Namespace, count: int, end: float, nth: int
) -> tuple[str, str, list[dict[str, Any]]]:
    """Runs a process, and as often as a side ends it or hangs one more, without that side.

    Returns:
      How the last one ended, its last words, and what all of them found.
    """
    flags = "" if options.interpret else part.flags
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        FLASHINFER_DIR: str(Path(options.flashinfer).resolve()) if options.flashinfer else "",
    }
    arguments = [sys.executable, "-m", *part.arguments, "--share", f"{nth}/{count}"]
    arguments += ["--interpret"] * options.interpret + [f"--cell={cell}" for cell in options.cell]
    printed = (options.output or RESULTS) / f"first_gpu_run_{part.name.replace(' ', '_')}_{nth}.unfinished"
    without: dict[str, dict[str, str]] = {"*": dict.fromkeys(options.without, "left out by --without")}
    found: list[dict[str, Any]] = []
    retried: set[str] = set()
    while True:
        done = [each["name"] for each in found if "name" in each]
        resume = json.dumps({"done": done, "without": without})
        with printed.open("w") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                [*arguments, "--resume", resume],
                stdout=out,
                stderr=err,
                env=environment,
                text=True,
                start_new_session=True,
            )
            how = _end(process, printed, end)
            err.seek(0)
            said = err.read()[-2000:]
        texts = printed.read_text().splitlines()
        lines = [json.loads(text) for text in texts if text[:1] + text[-1:] == "{}"]
        printed.unlink()
        found += [line for line in lines if "name" in line or "environment" in line and not found]
        at = next((line["at"] for line in reversed(lines) if "at" in line), None)
        if how in (ENDED, OVER) or at is None:
            return how, said, found
        lost = next((line["lost"] for line in lines if "lost" in line), how)
        name, side, step = at
        reason = f"{step}: {lost}"
        if side is not None:
            without.setdefault(name, {})[side] = reason
            num_crashes = sum(side in sides for where, sides in without.items() if where != "*")
            if num_crashes >= ALLOWED_CRASHES:
                without["*"][side] = f"left out after its crash on {name}: {reason}"
        elif name in retried and step != FREEING:  # no side can be left out
            found.append({"name": name, "skipped": reason})
        retried.add(name)


def _end(process: subprocess.Popen, printed: Path, end: float) -> str:
    """Waits for a process until it ends, gives no sign any more, or the time is over: says which it was."""
    size, last_sign = -1, 0.0
    while True:
        if printed.stat().st_size != size:
            size, last_sign = printed.stat().st_size, time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(max(0.0, min(0.1, end - time.monotonic())))
            how = f"ended with exit status {status}" if status else ENDED
            if status < 0:
                how = f"ended by {signal.Signals(-status).name}"
            break
        if time.monotonic() >= end:
            how = OVER
            break
        if time.monotonic() - last_sign >= LIMIT_S:
            how = f"no sign for {LIMIT_S:.0f} s"
            break
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait(10)  # it may hang in the driver
    return how


def contests_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists all contests that were held."""
    return [found for part in report["parts"] for found in part["found"] if "sides" in found]


def skipped_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists the contests that could not be made, each with the reason."""
    return [found for part in report["parts"] for found in part["found"] if "skipped" in found]


def verdict(report: dict[str, Any]) -> dict[str, Any]:
    """Says where this was, and of each kernel whether all its shapes were right; None if none was tried."""
    founds = [found for part in report["parts"] for found in part["found"]]
    where = next((found["environment"] for found in founds if "environment" in found), {})
    ours = [
        (contest["name"], record["status"] in (CHECKED, MEASURED))
        for contest in contests_of(report)
        for record in contest["sides"]
        if record["is_ours"]
    ]
    device = where.get("device") or {}
    missing = left_out(device.get("name", ""), device.get("compute_capability"))
    kernels: dict[str, bool | None] = dict.fromkeys(each for each in KERNELS.values() if each not in missing)
    for name, is_right in ours:
        kernel = KERNELS.get(re.split(r"[: ]", name)[0])
        if kernel is not None:
            kernels[kernel] = is_right and kernels[kernel] is not False
    all_right = bool(ours) and all(is_right for _, is_right in ours) and not skipped_of(report)
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
    """Writes the report, whole or not at all; one of a few parts does not replace one of all."""
    slug = _slug(report["verdict"]) + "_interpreted" * report["is_interpreted"]
    slug += "_only" * (not report["is_whole"])
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
    "median (p10 - p90), us": "{us}",
    "GB/s": "{gb_per_s}",
    "of the ceiling": "{share}",
    "first call, s": "{first}",
}


def show(report: dict[str, Any]) -> None:
    """Prints a table per part, what it says of decodes beside peers, then the verdict."""
    if report["is_interpreted"]:
        print("interpreted on the CPU: the path is checked, nothing is measured")
    for part in report["parts"]:
        of_part = {"parts": [part]}
        rows = [
            _printed(contest, record, report["comparison"]["ceilings"])
            for contest in contests_of(of_part)
            for record in contest["sides"]
        ]
        show_records(f"{part['title']} ({part['seconds']:.0f} s, {part['how']})", COLUMNS, rows, 3)
        for line in absences(contests_of(of_part)):
            print(line)
        for each in skipped_of(of_part):
            print(f"skipped {each['name']}: {each['skipped']}")
        if part["left_out"]:
            print(f"left out, no time: {'; '.join(part['left_out'])}")
        if part["said"]:
            print(part["said"].strip().splitlines()[-1])
    show_comparison(report["comparison"], sum(part["seconds"] for part in report["parts"]))
    found = report["verdict"]
    for kernel, is_right in found["kernels"].items():
        print(f"{kernel}: {'not tried' if is_right is None else 'right' if is_right else 'WRONG'}")
    device = found["device"] or {}
    print(
        f"{device.get('name', 'no device')}, driver {device.get('driver')}, jax {found['jax']}, kernels "
        f"{found['code']}: {'all is right' if found['is_right'] else 'not all is right'}"
    )


def _printed(contest: dict[str, Any], record: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    error, first = record["error"], record["first_call_s"]
    rate = gb_per_s(contest, record["side"])
    us = "-"
    if record["median_us"] is not None:
        us = "{median_us:,.1f} ({p10_us:,.1f} - {p90_us:,.1f})".format(**record)
    return record | {
        "name": contest["name"],
        "error": "-" if error is None else f"{error:.1e}",
        "us": us,
        "gb_per_s": "-" if rate is None else f"{rate:,.0f}",
        "share": percent(of_ceiling(contest, record["side"], ceilings)),
        "first": "-" if first is None else f"{first:.0f}",
    }


if __name__ == "__main__":
    command.run(main)
