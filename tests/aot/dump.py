"""What Mosaic GPU's compiler leaves in a folder, read."""

import dataclasses
import os
import pathlib
import re

from jax.experimental.mosaic.gpu import constraints

from tests.aot.alignment import BASE, tma_alignment
from tests.aot.descriptors import read_host_code


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One compiled kernel.

    Attributes:
      name: Of the kernel, with its number in the program.
      registers: Of one thread.
      spill_bytes: Stored in plus loaded from local memory.
      shared_memory: Bytes of one CTA, barriers included.
      wgmma: Tensor core instructions that read shared memory.
      mma: Those that read registers.
      wgmma_groups: Groups of them that are committed.
      wgmma_waits: Waits for such groups.
      tma: Loads by the copy engine.
      tma_alignment: See `tests.aot.alignment.tma_alignment`.
      grid: CTAs along x, y and z.
      tanh_approx: Instructions that compute tanh to 11 bits.
      fences: Between what threads store to shared memory and what tensor cores or the copy engine read.
      serialized: Notes of the assembler that it waits for each product before the next, which costs time.
      descriptor_faults: Of the copy engine's descriptors, what CUDA would refuse.
      thread_copies: Copies of threads to shared memory.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_memory: int
    wgmma: int
    mma: int
    wgmma_groups: int
    wgmma_waits: int
    tma: int
    tma_alignment: int
    grid: tuple[int, ...]
    tanh_approx: int
    fences: int
    serialized: int
    descriptor_faults: tuple[str, ...]
    thread_copies: int


def dump_kernels(folder: pathlib.Path) -> None:
    """Has the compiler leave what it knows of each kernel, from now on, in an empty folder."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    # Nothing here reads the constraints of layouts, and to write them takes as long as to solve them.
    constraints.ConstraintSystem.__str__ = lambda self: ""


def read_kernels(folder: pathlib.Path) -> list[KernelCost]:
    """The kernels of a program that was compiled in a process of its own with this folder.

    Raises:
      ValueError: The dump is not as expected, say because nvdisasm was not found.
    """
    return [_read_kernel(path) for path in sorted(folder.glob("*.ptxas"))]


def shared_memory_sizes(passes: str) -> list[str]:
    """Bytes, once for each pass: all print the launch, and from the second on sizes are constants."""
    return re.findall(r"dynamic_shared_memory_size %c(\d+)_i32\b", passes)


def _read_kernel(ptxas: pathlib.Path) -> KernelCost:
    report = ptxas.read_text()
    passes = ptxas.with_suffix(".mlir-passes.log").read_text(errors="replace")
    disassembled = ptxas.with_suffix(".sass_ctrl")
    if not disassembled.exists():
        raise ValueError(f"{ptxas.stem} was not disassembled: is nvdisasm installed in this environment?")
    sass = disassembled.read_text()
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    sizes = shared_memory_sizes(passes)
    axis = r"%\w+ = %c(\d+)\w*"
    grids = re.findall(rf"blocks\([^)]*\) in \({axis}, {axis}, {axis}\)", passes)
    if not (registers and spills and sizes and grids):
        raise ValueError(
            f"cannot read registers, spills, shared memory and grid of {ptxas.stem} from {report!r}"
        )
    ptx = ptxas.with_suffix(".ptx").read_text()
    descriptors = read_host_code(passes).descriptors
    if "UTMALDG" in sass and not descriptors:
        raise ValueError(f"{ptxas.stem} loads by TMA, and no descriptor was found")
    return KernelCost(
        name=ptxas.stem,
        registers=max(int(n) for n in registers),
        spill_bytes=sum(int(n) for n in spills),
        shared_memory=int(sizes[-1]),
        wgmma=len(re.findall(r"\bHGMMA\b", sass)),
        mma=len(re.findall(r"\bHMMA\b", sass)),
        wgmma_groups=len(re.findall(r"\bwgmma\.commit_group\b", ptx)),
        wgmma_waits=len(re.findall(r"\bwgmma\.wait_group\b", ptx)),
        tma=len(re.findall(r"\bUTMALDG\b", sass)),
        tma_alignment=tma_alignment(ptx) if re.search(r"\bU(TMA\w+|BLKCP)\b", sass) else BASE,
        grid=tuple(int(n) for n in grids[-1]),
        tanh_approx=len(re.findall(r"\btanh\.approx\b", ptx)),
        fences=len(re.findall(r"\bfence\.proxy\.async\b", ptx)),
        serialized=len(re.findall(r"wgmma\S* instructions are serialized", report)),
        descriptor_faults=tuple(fault for each in descriptors for fault in each.faults()),
        thread_copies=len(re.findall(r"\bLDGSTS\b", sass)),
    )
