# pyright: reportMissingImports=false
"""Compiles the FlashInfer modules that `experiments.first_gpu_run` calls, on a machine that needs no GPU.

    python -m experiments.on_device.flashinfer_modules DIR
    python -m experiments.first_gpu_run --flashinfer DIR

Needs flashinfer-python, ninja, a C++ compiler and nvcc; any PyTorch. The modules go to DIR/<name>/<name>.so,
which FlashInfer of the same version loads without a compiler; delete DIR/build afterwards, or leave it to
go on from. Two cores take about 30 s a module (FlashInfer 0.7.2, nvcc 13.0). Exit status 1 if one fails.
"""

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.common import command
from experiments.on_device.cells import BLOCK_SIZES, GROUP_SIZES, Cell

ARCHITECTURE = "9.0a"  # Hopper, with wgmma and TMA


def specs() -> Iterator[Any]:
    """FlashInfer's build specs: fa2 on CUDA cores, on tensor cores, and XQA for every block and group."""
    import torch
    from flashinfer import jit
    from flashinfer.jit.xqa import gen_xqa_module

    bf16, head_dim = torch.bfloat16, Cell._field_defaults["head_dim"]
    dtypes, head_dims = (bf16, bf16, bf16, torch.int32), (head_dim, head_dim)
    no_position_encoding = 0
    yield jit.gen_batch_decode_module(*dtypes, *head_dims, no_position_encoding, False, False)
    yield jit.gen_batch_prefill_module("fa2", *dtypes, *head_dims, no_position_encoding, False, False, False)
    for block_size in BLOCK_SIZES:
        for group_size in GROUP_SIZES:
            yield gen_xqa_module(bf16, bf16, block_size, head_dim, group_size, False, bf16)


def stub_driver(folder: Path) -> None:
    """An empty libcuda to link with: the real one comes with the GPU's driver."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so", "-x", "c", os.devnull]
    subprocess.run(["cc", *options], check=True)
    paths = [os.environ.get("LIBRARY_PATH"), str(folder)]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.on_device.flashinfer_modules", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="takes the modules")
    folder = parser.parse_args(arguments).folder.resolve()
    missing = [name for name in ("torch", "flashinfer") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} cannot be imported here, expected FlashInfer and any PyTorch")
    stub_driver(folder / "build" / "stub")
    # Read when FlashInfer is imported.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCHITECTURE)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder / "build")
    num_failed = 0
    for spec in specs():
        start = time.monotonic()
        try:
            spec.build()
            target = folder / spec.name / f"{spec.name}.so"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(spec.jit_library_path, target)
        except Exception as error:  # a module that does not build must not hide the others
            num_failed += 1
            print(f"{spec.name}: FAILED, {str(error).strip().splitlines()[-1]}", flush=True)
        else:
            print(f"{spec.name}: {time.monotonic() - start:.0f} s", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    command.run(main)
