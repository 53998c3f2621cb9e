"""Writes docs/devices.md: what is interpreted, emulated, compiled, run and measured, per architecture.

    python -m tests.site.devices

Nothing in the page is written by hand, and a test holds it to what this writes. What is interpreted and
compiled are the tests and the cases of the gates; what ran and was measured are the records in
experiments/results, each of which names its device.
"""

import ast
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels import gpus
from pallas_kernels.decode_rows import MAX_QUERIES
from pallas_kernels.gpus import HOPPER, served
from pallas_kernels.mosaic_gpu import limits as gpu_limits
from pallas_kernels.mosaic_gpu import prefill
from pallas_kernels.mosaic_tpu import limits as tpu_limits
from tests.aot import tpu, tpu_programs
from tests.aot.cases import CASES
from tests.aot.decode_steps import STEPS
from tests.aot.emulated_cases import cases as emulated_cases
from tests.aot.program_cost import all_programs
from tests.aot.target import A100, B200, H200, L4, RTX_5090, Target
from tests.support.sources import ROOT

PAGE = ROOT / "docs" / "devices.md"
RESULTS = ROOT / "experiments" / "results"
COLUMNS = ("architecture", "interpreted", "emulated", "compiled", "run", "measured")
NO = "no"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Devices of one kind.

    Attributes:
      kind: Matches the names that jax gives them, as records have it.
      kernel_tests: A pattern of the files below tests/kernels that interpret their kernels.
      emulated, compiled: What is done without a record.
    """

    name: str
    kind: str
    kernel_tests: str | None = None
    emulated: Callable[[], str] = lambda: NO
    compiled: Callable[[], str] = lambda: NO

    def row(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """Fills in the line of the table."""
        own = [record for record in records if re.search(self.kind, record["device"])]
        measured = f"{len(own)} records" if own else NO
        run = "by the records" if own else NO
        interpreted = interpreted_tests(self.kernel_tests) if self.kernel_tests else NO
        return [self.name, interpreted, self.emulated(), self.compiled(), run, measured]


def interpreted_tests(pattern: str) -> str:
    """Counts the tests that interpret kernels."""
    files = sorted((ROOT / "tests" / "kernels").glob(pattern))
    functions = [node for file in files for node in ast.parse(file.read_text()).body]
    number = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in functions)
    assert number, pattern
    return f"{number} tests"


def emulated_for(*targets: Target) -> str:
    number = sum(case.target in targets for case in emulated_cases(num_random=0, seed=0))
    return f"`make aot`: {number} shapes, and random ones"


def compiled_for(*targets: Target) -> str:
    return f"`make aot`: {sum(case.target in targets for case in CASES)} kernels"


def compiled_for_hopper() -> str:
    num_programs = len(all_programs()) + len(STEPS)
    return f"{compiled_for(H200)} and steps, {num_programs} programs"


def compiled_for_tpu(target: str) -> Callable[[], str]:
    def compiled() -> str:
        assert any(each.startswith(target) for each in tpu.TARGETS), target
        found = f"`make aot-tpu`: {len(tpu.CASES)} kernels and steps"
        is_for_programs = tpu_programs.TARGET.startswith(target)
        return found + f", {len(tpu_programs.tpu_programs())} programs" * is_for_programs

    return compiled


def host_devices() -> str:
    """Reads on how many devices the tests run."""
    [number] = re.findall(r"host_platform_device_count=(\d+)", (ROOT / "tests" / "conftest.py").read_text())
    return f"{number} devices of a host"


GPU_TESTS, TPU_TESTS, THREAD_TESTS = "test_mosaic_gpu*.py", "test_mosaic_tpu*.py", "test_gpu_threads.py"
ARCHITECTURES = (
    Architecture("CPU", r"^cpu$"),
    Architecture("a mesh of several devices", r"^$", emulated=host_devices),
    Architecture(
        "NVIDIA Hopper",
        HOPPER.kinds,
        GPU_TESTS,
        functools.partial(emulated_for, H200),
        compiled_for_hopper,
    ),
    Architecture(
        "NVIDIA Blackwell",
        r"\b(G?B[123]00|RTX 50\d\d|RTX PRO \d+ Blackwell)\b",
        emulated=functools.partial(emulated_for, B200, RTX_5090),
        compiled=functools.partial(compiled_for, B200, RTX_5090),
    ),
    Architecture(
        "NVIDIA Ada",
        gpus.L4.kinds,
        THREAD_TESTS,
        functools.partial(emulated_for, L4),
        functools.partial(compiled_for, L4),
    ),
    Architecture(
        "NVIDIA Ampere",
        f"{gpus.A100.kinds}|{gpus.A10.kinds}",
        THREAD_TESTS,
        functools.partial(emulated_for, A100),
        functools.partial(compiled_for, A100),
    ),
    Architecture("TPU v5e", r"TPU v5", TPU_TESTS, compiled=compiled_for_tpu("v5e")),
    Architecture("TPU v6e", r"TPU v6", TPU_TESTS, compiled=compiled_for_tpu("v6e")),
    Architecture("TPU 7x", r"TPU ?v?7", TPU_TESTS, compiled=compiled_for_tpu("tpu7x")),
)


def read_records() -> list[dict[str, Any]]:
    """Reads each record with its file's name and its device's."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        device = record.get("device", "cpu")  # those without were made on a machine that has no other
        name = device["name"] if isinstance(device, dict) else device
        found.append(record | {"file": path.name, "device": name})
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def limits() -> list[list[str]]:
    """Lists what kernels take; XLA takes everything."""
    gpu_dims, tpu_lanes = " or ".join(map(str, gpu_limits.HEAD_DIMS)), tpu_limits.NUM_LANES
    tpu_blocks = ", ".join(f"{tpu_limits.sublanes(_dtype(name))} for {name}" for name in tpu_limits.DTYPES)
    return [
        [
            "`mosaic_gpu`",
            f"NVIDIA GPUs of compute capability {served()}",
            " or ".join(gpu_limits.DECODED)
            + "; from Hopper on 8 bits with a scale and maybe an offset per token and head",
            f"{gpu_dims}; of 8 bits {' or '.join(map(str, gpu_limits.WIDENED_HEAD_DIMS))}",
            f"a multiple of 8 up to {gpu_limits.MAX_BLOCK_SIZE}",
        ],
        [
            "`mosaic_tpu`",
            "TPUs",
            " or ".join(tpu_limits.DTYPES),
            f"a multiple of {tpu_lanes}",
            f"a multiple of {tpu_blocks}",
        ],
    ]


def prefilled() -> str:
    """Says which rows have a kernel of their own."""
    head_dims, most = " or ".join(map(str, prefill.HEAD_DIMS)), MAX_QUERIES
    return f"""Rows with room for {prefill.MIN_QUERIES} queries and more are prefilled at once by \
`mosaic_gpu`, of 16 bits and of 8, where
head_dim is {head_dims} and block_size a multiple of {prefill.MIN_PIECE_LEN}, from Hopper on \
where shared memory is enough (on an RTX 5090 for
head_dim {min(prefill.HEAD_DIMS)} alone); others are decoded as rows of {most} queries."""


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def page() -> str:
    """Writes the page."""
    records = read_records()
    unknown = [
        record["file"]
        for record in records
        if not any(re.search(a.kind, record["device"]) for a in ARCHITECTURES)
    ]
    assert not unknown, f"{unknown} name devices of no architecture: add a line to ARCHITECTURES"
    made = [
        [f"[{each['file']}](../experiments/results/{each['file']})", each["device"], each["machine"]["cpu"]]
        for each in records
    ]
    return f"""# Devices

`python -m tests.site.devices` writes this page from the tests, the gates and the records of the repository.

{table(COLUMNS, [each.row(records) for each in ARCHITECTURES])}

* **Interpreted**: kernels run on a CPU by jax's interpreters, which look for races, and are compared with a
  float32 reference.
* **Emulated**: programs run on a CPU that stands for the device. For GPUs they are the PTX of the kernels;
  copies and products land at once, and in a second run when they are waited for. Fences, barriers and
  addresses are checked, and results are compared with the reference. Kernels for Blackwell are those for
  Hopper, but that they multiply by `mma`, which jax's interpreter does not know, with the stages that fit.
  Those for Ampere and Ada have no copy engine, either: threads copy keys and values (`cp.async`), load
  queries, store results and move blocks. Prompts are decoded there as rows of 8 queries, and caches of 8 bits
  are XLA's.
* **Compiled**: for the device and without one, within budgets; what a compiler says of registers, memory,
  copies and waits is checked.
* **Run**: on the device itself. **Measured**: timed there, with a record.

`implementation=` names the backend of attention, which then runs or raises; what it lacks is XLA's, and so
are gradients. `mosaic_gpu_cascade` and `mosaic_tpu_cascade` are by the same kernels, and read columns that
rows have in common (samples of a prompt, hits of a prefix) once for up to eight rows. Where the config names
none, the environment may: `KVCACHE_JAX_IMPLEMENTATION=xla|mosaic_gpu|mosaic_tpu` counts as if all configs
named it, and `auto`, as if it were not set. Else a verdict decides: `python -m experiments.first_gpu_run`
checks all kernels on a GPU and writes one, a JSON file, to the folder that `KVCACHE_JAX_VERDICTS` names, by
default `~/.cache/kvcache_jax/verdicts`. Where it passed for the name of the device, the version of jax and
the digest of the kernels' sources, attention is by kernels if they take the cache. All else is XLA's: without
a verdict (a line of the logger `kvcache_jax` says so once, at level INFO), in processes with several devices
and on meshes, which a verdict of one device says nothing of, under `jax.default_device` of another device, in
programs lowered for another platform, and in every export, which may come to run anywhere. No verdict comes
with the package yet, and for TPUs no command writes one. Both variables are read once, when they are first
needed.

Kernels take:

{table(("backend", "devices", "keys and values", "head_dim", "block_size"), limits())}

{prefilled()}

FlashInfer is no backend but a peer in the benchmark: what its decode takes reaches it from XLA by Python in
each launch, or by C++ that is compiled where it is installed ([NOTES.md](../pallas_kernels/NOTES.md)). On
TPUs tokamax's paged attention reads keys and values of one array, where they lie in turns head by head, so
that each call would copy the pools; the prefill of rows of 9 queries and more is our own.

## Records

{table(("record", "device", "machine"), made)}
"""


def main() -> int:
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
