"""Compiles the kernels of a function for a GPU, and runs them on the CPU in their place.

In a process that has called `prepare` before its first use of CUDA's compiler.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_gpu import append, decode, limits, merge, move_blocks, prefill
from tests.aot import h200
from tests.aot.descriptors import HostCode, read_host_code
from tests.aot.dump import dump_kernels, shared_memory_sizes
from tests.aot.emulator.cta import Cta, Launch
from tests.aot.emulator.memory import FaultError, GlobalMemory, UnknownError
from tests.aot.emulator.program import Program, parse
from tests.aot.target import Target

_LAUNCHERS = (append, decode, merge, move_blocks, prefill)


class Kernel(NamedTuple):
    """One, compiled; `shared_memory` are bytes."""

    program: Program
    host: HostCode
    shared_memory: int


_compiled: dict[str, Kernel] = {}


def prepare(folder: pathlib.Path) -> None:
    """Has this process compile for GPUs, and dump to an empty folder."""
    h200.start_compiler()
    dump_kernels(folder)


@contextlib.contextmanager
def emulated(lands_late: bool, target: Target, kernels: list[Kernel]) -> Iterator[None]:
    """Within it, kernels of functions that are called without `jit` are emulated.

    Args:
      lands_late: See `Launch`.
      target: The GPU.
      kernels: What an earlier call with the same shapes compiled, in order; empty for the first call, which
        adds its own.
    """
    known = iter(tuple(kernels))
    device = h200.abstract_device(target)
    launchers = [(module, module.launch) for module in _LAUNCHERS]

    def compiled(program: Callable, arrays: list[jax.Array]) -> Kernel:
        kernel = next(known, None)
        if kernel is None:
            kernels.append(kernel := _compile(program, arrays, target))
        return kernel

    def launch(body: Callable, *, cost: Any, interpret: bool, **options: Any) -> Callable:
        def call(*inputs: Any) -> Any:
            kernel = launchers[0][1](body, cost=cost, interpret=False, **options)
            return _run(kernel, options, inputs, lands_late, compiled)

        return call

    try:
        for module, _ in launchers:
            module.launch = launch
        with mock.patch.object(limits, "_traced_for", lambda: device):
            yield
    finally:
        for module, original in launchers:
            module.launch = original


def _run(
    kernel: Callable,
    options: dict[str, Any],
    inputs: tuple,
    lands_late: bool,
    compiled: Callable[..., Kernel],
) -> Any:
    """Runs all CTAs of what `compiled` gives; references among the inputs are changed in place."""
    is_ref = [isinstance(each, jax.Ref) for each in inputs]
    arrays = [each[...] if ref else each for each, ref in zip(inputs, is_ref, strict=True)]

    def program(*arrays: jax.Array) -> Any:
        refs = [jax.new_ref(array) if ref else array for array, ref in zip(arrays, is_ref, strict=True)]
        return kernel(*refs), [each[...] for each, ref in zip(refs, is_ref, strict=True) if ref]

    found = compiled(program, arrays)
    results = options.get("out_type", ())
    is_one = isinstance(results, jax.ShapeDtypeStruct)
    results = [results] if is_one else list(results)
    # What no CTA writes is as bad as what another kernel left there.
    nan = [np.full(result.shape, np.nan).astype(result.dtype) for result in results]
    buffers = [np.array(array) for array in arrays] + nan
    memory = GlobalMemory()
    addresses = [memory.add(buffer) for buffer in buffers]
    host = found.host
    tensors = [(each, buffers[each.buffer].reshape(-1).view(np.uint8)) for each in host.descriptors]
    pointers = [addresses[nth] for nth in host.pointers]
    launch = Launch(
        found.program,
        memory,
        pointers,
        tensors,
        found.shared_memory,
        lands_late,
        options.get("num_threads", 1),
    )
    [num_ctas] = options["grid"]
    for index in range(num_ctas):
        Cta(launch, index).run()
    for each, buffer in zip(inputs, buffers, strict=False):
        if isinstance(each, jax.Ref):
            each[...] = jnp.asarray(buffer)
    outs = [jnp.asarray(buffer) for buffer in buffers[len(arrays) :]]
    return outs[0] if is_one else outs


def _compile(program: Callable, arrays: list[jax.Array], target: Target) -> Kernel:
    with h200.lowering(target=target):
        lowered = jax.jit(program).lower(*h200.place(arrays, target=target))
    text = target.name + lowered.as_text()
    if text not in _compiled:
        folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
        before = set(folder.glob("*.ptx"))
        lowered.compile()
        new = set(folder.glob("*.ptx")) - before
        if len(new) != 1:
            raise UnknownError(f"{len(new)} kernels were compiled, expected one")
        path = new.pop()
        passes = path.with_suffix(".mlir-passes.log").read_text(errors="replace")
        size = int(shared_memory_sizes(passes)[-1])
        if size > target.gpu.shared_memory:
            raise FaultError(f"{size} bytes of shared memory do not fit into {target.name}")
        _compiled[text] = Kernel(parse(path.read_text()), read_host_code(passes), size)
    return _compiled[text]
