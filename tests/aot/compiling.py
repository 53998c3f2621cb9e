"""One compile case, compiled for its GPU in a process of its own, and what the program costs."""

import dataclasses
import math
import pathlib

import jax
import numpy as np

from tests.aot import h200
from tests.aot.cases import CASES
from tests.aot.dump import KernelCost, dump_kernels, read_kernels
from tests.aot.hlo import COLLECTIVE, kernel_calls, num_copies


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """A compiled program.

    Attributes:
      kernels: Of Mosaic GPU.
      temporary_bytes: Device memory beside arguments and results.
      pool_copies: Copies of an array as big as a pool, or bigger.
      missing_alias_bytes: Of the arguments to be updated in place, bytes that results do not share.
      called: Names of the kernels that it calls, each as often as it does.
      collectives: What moves arrays between devices, if anything does.
    """

    kernels: tuple[KernelCost, ...]
    temporary_bytes: int
    pool_copies: int
    missing_alias_bytes: int
    called: tuple[str, ...]
    collectives: tuple[str, ...]


def compile_case(name: str, folder: pathlib.Path) -> ProgramCost:
    """Compiles the case of that name, in a process that compiles no other: a kernel that the process has
    compiled before would not be dumped again.

    Args:
      name: Of a case.
      folder: Exists and is empty; takes the compiler's dump and the program's HLO.
    """
    h200.start_compiler()
    dump_kernels(folder)
    case = next(case for case in CASES if case.name == name)
    arguments = h200.place(case.arguments(), case.num_devices, case.split, case.target)
    with h200.lowering(case.num_devices, case.target):
        lowered = jax.jit(case.function, donate_argnums=case.in_place).lower(*arguments)
        compiled = lowered.compile(compiler_options=dict(case.compiler_options))
    hlo = compiled.as_text()
    (folder / "program.hlo").write_text(hlo)
    memory = compiled.memory_analysis()
    # The text and the numbers are those of one device.
    pool_sizes = [math.prod(_local_shape(arguments[i])) for i in case.pools]
    donated = sum(_num_bytes(arguments[i]) for i in case.in_place)
    return ProgramCost(
        kernels=tuple(read_kernels(folder)),
        temporary_bytes=memory.temp_size_in_bytes,
        pool_copies=num_copies(hlo, min(pool_sizes)) if pool_sizes else 0,
        missing_alias_bytes=max(donated - memory.alias_size_in_bytes, 0),
        called=tuple(kernel_calls(hlo)),
        collectives=tuple(sorted(set(COLLECTIVE.findall(hlo)))),
    )


def _local_shape(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return array.sharding.shard_shape(array.shape)


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(_local_shape(array)) * np.dtype(array.dtype).itemsize
