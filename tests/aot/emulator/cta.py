"""A CTA: its warpgroups, each of 128 threads in lock step, in one of two models of asynchrony.

Each warpgroup runs until it has to wait; then another one does.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.aot.descriptors import Descriptor
from tests.aot.emulator import tensor_cores
from tests.aot.emulator.arithmetic import TYPES, compute
from tests.aot.emulator.copies import Barrier, Copy, ThreadCopies, tensor_copy
from tests.aot.emulator.memory import (
    GLOBAL,
    NUM_THREADS,
    NUM_WARPS,
    SHARED,
    FaultError,
    GlobalMemory,
    SharedMemory,
    UnknownError,
)
from tests.aot.emulator.program import Instruction, Program, split

MAX_STEPS = 100_000
"""Instructions of a warpgroup; more are taken for a loop without an end."""
_PARAMETERS, _DESCRIPTOR_BYTES = 1 << 60, 128
_WARP, _LANE = np.divmod(np.arange(NUM_THREADS), 32)
_ALL = np.ones(NUM_THREADS, bool)
_ADDRESS = re.compile(r"\[\s*([^\s\]+]+)(?:\+(-?\d+))?\s*\]")
_TENSOR = re.compile(r"\[\s*(\S+), (\{.*\})\s*\]")
_REGISTER_BITS = {"%rd": 64, "%rs": 16}


class Launch(NamedTuple):
    """What all CTAs of a kernel share.

    Attributes:
      program: Of the kernel.
      memory: Global memory.
      pointers: Addresses that the kernel gets, in order.
      tensors: Descriptors that it gets, and the bytes of the array of each.
      shared_memory: Bytes.
      lands_late: Copies and products land only when they are waited for, and the last warpgroup begins; else
        at once, and the first one does.
      num_warpgroups: Of a CTA.
    """

    program: Program
    memory: GlobalMemory
    pointers: Sequence[int]
    tensors: Sequence[tuple[Descriptor, np.ndarray]]
    shared_memory: int
    lands_late: bool
    num_warpgroups: int = 1


class _Waits(Exception):  # noqa: N818  it is no error as long as another warpgroup goes on
    """What a warpgroup waits for is yet to come; the message says what."""


class _Product(NamedTuple):
    """A wgmma on its way: `accumulators += a @ b`; `a` are places in shared memory, or registers."""

    a: np.ndarray | list[str]
    b: np.ndarray
    accumulators: list[str]
    dtype: str


class Cta:
    """One; `run` runs it.

    Attributes:
      launch: See there.
      index: Among all CTAs.
      shared: Its memory.
      barriers: In it, by address.
      num_meetings: Barriers of all threads at which all have arrived.
    """

    def __init__(self, launch: Launch, index: int):
        self.launch, self.index = launch, index
        self.shared = SharedMemory(launch.shared_memory, launch.num_warpgroups)
        self.barriers: dict[int, Barrier] = {}
        self._warpgroups = [_Warpgroup(self, nth) for nth in range(launch.num_warpgroups)]
        self._met: list[int] = []
        self.num_meetings = 0

    def run(self) -> None:
        """Runs all instructions.

        Raises:
          FaultError: One of them is wrong, or may be on a GPU.
          UnknownError: The emulator has to learn it first.
        """
        running = self._warpgroups[:: -1 if self.launch.lands_late else 1]
        with np.errstate(all="ignore"):
            while running:
                num_steps = sum(each.num_steps for each in running)
                waits = [each.advance() for each in running]
                if None not in waits and num_steps == sum(each.num_steps for each in running):
                    raise FaultError("; ".join(filter(None, waits)))
                running = [each for each, wait in zip(running, waits, strict=True) if wait]
        self.shared.check_idle()

    def meet(self, warpgroup: int) -> int:
        """A warpgroup arrives at a barrier of all threads; it may go on after so many meetings."""
        self._met.append(warpgroup)
        meeting = self.num_meetings + 1
        if len(self._met) == len(self._warpgroups):
            known = [self.shared.order.passed_on(each) for each in self._met]
            for each in self._met:
                self.shared.barrier(each)
                for other in known:
                    self.shared.order.learned(each, other)
            for barrier in self.barriers.values():
                barrier.is_known |= barrier.is_fenced
            self._met, self.num_meetings = [], meeting
        return meeting


class _Warpgroup:
    """One of a CTA; `advance` runs it until it has to wait.

    Attributes:
      num_steps: Instructions that it has run.
    """

    def __init__(self, cta: Cta, index: int):
        self._cta, self._index = cta, index
        self._launch, self._program, self._shared = cta.launch, cta.launch.program, cta.shared
        self._barriers = cta.barriers
        self._stores: list[list[Copy]] = [[]]  # groups; the last one is open
        self._thread_copies = ThreadCopies(cta.shared, cta.launch.lands_late)
        self._products: list[list[_Product]] = [[]]
        self._unfenced: set[str] = set()  # registers that were written since the last wgmma.fence
        self._meeting: int | None = None  # the one at which it has arrived, and waits
        self._position = self.num_steps = 0
        threads = np.arange(NUM_THREADS, dtype=np.uint64) + NUM_THREADS * index
        self._warp = _WARP + NUM_WARPS * index
        self._registers = {"%tid.x": threads, "%ctaid.x": np.full_like(threads, cta.index)}
        self._registers["__dynamic_shmem__0"] = np.full_like(threads, SHARED)
        for nth, name in enumerate(self._program.parameters):
            self._registers[name] = np.full_like(threads, _PARAMETERS + (nth << 20))

    def advance(self) -> str | None:
        """Runs until it has to wait, and says for what; None at its end."""
        instructions = self._program.instructions
        while self._position < len(instructions):
            if self.num_steps == MAX_STEPS:
                raise FaultError(f"is not at its end after {MAX_STEPS} instructions")
            instruction = instructions[self._position]
            try:
                self._position = self._step(instruction, self._position)
            except _Waits as wait:
                return f"{instruction.where}: {wait}"
            except FaultError as fault:
                raise FaultError(f"{instruction.where}: {fault}") from None
            except (UnknownError, LookupError, TypeError, ValueError) as error:
                raise UnknownError(f"{instruction.where}: {error!r}") from error
            self.num_steps += 1
        self._wait_for_stores(0, is_read_only=False, is_end=True)
        return None

    def _step(self, instruction: Instruction, position: int) -> int:
        """Executes an instruction, and returns the position of the next."""
        active = _ALL
        if instruction.predicate:
            active = self._registers[instruction.predicate] != instruction.is_negated
        words, operands = instruction.words, instruction.operands
        if words[0] in ("bra", "ret"):
            if active.any() and not active.all():
                raise FaultError("branches in some threads only")
            if not active.any():
                return position + 1
            return self._program.labels[operands[0]] if words[0] == "bra" else len(self._program.instructions)
        handler = getattr(self, f"_{words[0]}", None)
        if handler:
            if active.any():
                handler(words, operands, active)
        elif words[0] not in ("prefetch", "setmaxnreg"):
            self._write(operands[0].split("|")[0], compute(words, operands[1:], self._read), active)
        return position + 1

    # Registers.

    def _read(self, operand: str, dtype: np.dtype) -> np.ndarray:
        if operand in self._registers:
            bits = self._registers[operand]
            return bits if bits.dtype == dtype else bits.astype(f"u{dtype.itemsize}").view(dtype)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.removesuffix("U"), 0)
        bits = np.array(number & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)
        return np.full(NUM_THREADS, bits)

    def _write(self, register: str, values: np.ndarray, active: np.ndarray) -> None:
        if values.dtype != bool:
            bits = _REGISTER_BITS.get(register[:3], 32)
            if values.dtype.kind == "i" and values.dtype.itemsize * 8 < bits:
                values = values.astype(f"i{bits // 8}")
            values = values.view(f"u{values.dtype.itemsize}").astype(np.uint64)
        if not active.all():
            values = np.where(active, values, self._registers.get(register, np.zeros_like(values)))
        self._registers[register] = values
        self._unfenced.add(register)

    def _addresses(self, operand: str) -> np.ndarray:
        place = _ADDRESS.fullmatch(operand)
        if place is None:
            raise UnknownError(f"the address {operand!r}")
        return self._read(place[1], TYPES["s64"]) + int(place[2] or 0)

    def _same(self, values: np.ndarray) -> int:
        """The value that all threads have."""
        if (values != values[0]).any():
            raise FaultError("differs between threads, expected the same")
        return int(values[0])

    def _mov(self, words, operands, active) -> None:
        """Also of several registers into one, or of one into several."""
        targets, sources, whole = split(operands[0]), split(operands[1]), TYPES[words[-1]]

        def part(number: int) -> np.dtype:
            return whole if number == 1 else np.dtype(f"u{whole.itemsize // number}")

        values = np.stack([self._read(name, part(len(sources))) for name in sources], axis=1)
        for name, column in zip(targets, values.view(part(len(targets))).T, strict=True):
            self._write(name, column.copy(), active)

    def _elect(self, words, operands, active) -> None:
        register, predicate = operands[0].split("|")
        self._write(register, np.zeros(NUM_THREADS, np.uint32), active)
        self._write(predicate, _LANE == 0, active)

    def _shfl(self, words, operands, active) -> None:
        values, lane = (self._read(operand, TYPES["u32"]) for operand in operands[1:3])
        source = {"bfly": _LANE ^ lane, "idx": lane & 31}[words[2]].astype(np.int64)
        self._write(operands[0].split("|")[0], values[_WARP * 32 + source], active)

    # Memory, by threads.

    def _ld(self, words, operands, active) -> None:
        if words[1].startswith("param"):
            pointer = self._launch.pointers[self._program.parameters.index(operands[1].strip("[]"))]
            return self._write(operands[0], np.full(NUM_THREADS, pointer, np.uint64), active)
        names, dtype = split(operands[0]), TYPES[words[-1]]
        addresses, num_bytes = self._addresses(operands[1])[active], dtype.itemsize * len(names)
        if _is_shared(words, addresses):
            loaded = self._shared.read(addresses, num_bytes, self._warp[active])
        else:
            loaded = self._launch.memory.read(addresses, num_bytes)
        values = np.zeros((NUM_THREADS, num_bytes), np.uint8)
        values[active] = loaded
        for name, column in zip(names, values.view(dtype).T, strict=True):
            self._write(name, column.copy(), active)

    def _st(self, words, operands, active) -> None:
        values = np.stack([self._read(name, TYPES[words[-1]]) for name in split(operands[1])], axis=1)
        addresses, values = self._addresses(operands[0])[active], values.view(np.uint8)[active]
        if _is_shared(words, addresses):
            self._shared.write(addresses, values, self._warp[active])
        else:
            self._launch.memory.write(addresses, values)

    def _ldmatrix(self, words, operands, active) -> None:
        names = split(operands[0])
        threads, addresses = tensor_cores.row_addresses(self._addresses(operands[1]), len(names))
        rows = self._shared.read(addresses, 16, self._warp[threads])
        registers = tensor_cores.to_registers(rows, len(names), "trans" in words)
        for name, values in zip(names, registers, strict=True):
            self._write(name, values, active)

    def _stmatrix(self, words, operands, active) -> None:
        registers = np.stack([self._read(name, TYPES["b32"]) for name in split(operands[1])])
        threads, addresses = tensor_cores.row_addresses(self._addresses(operands[0]), len(registers))
        rows = tensor_cores.from_registers(registers, "trans" in words)
        self._shared.write(addresses, rows, self._warp[threads])

    # What threads wait for.

    def _bar(self, words, operands, active) -> None:
        is_of_all = len(operands) == 1 or self._launch.num_warpgroups == 1
        if not active.all() or operands[1:] not in ((), (str(NUM_THREADS),)):
            raise FaultError(f"is a barrier of some threads, expected all {NUM_THREADS}")
        if not is_of_all:
            # Warpgroups that shared one would wait for each other.
            if self._same(self._read(operands[0], TYPES["u32"])) != self._index + 1:
                raise UnknownError("a barrier of one warpgroup that is not its own")
            return self._shared.barrier(self._index)
        if self._meeting is None:
            self._meeting = self._cta.meet(self._index)
        if self._cta.num_meetings < self._meeting:
            raise _Waits("waits forever for another warpgroup")
        self._meeting = None

    def _fence(self, words, operands, active) -> None:
        if words[1:3] == ("proxy", "async"):
            if not active.all():
                raise FaultError("is a fence of some threads, expected all")
            self._shared.fence(self._index)
        for barrier in self._barriers.values():
            barrier.is_fenced |= words[1] == "mbarrier_init"

    def _mbarrier(self, words, operands, active) -> None:
        if words[1] == "init":
            place = self._same(self._addresses(operands[0])[active])
            count = self._same(self._read(operands[1], TYPES["u32"])[active])
            self._barriers[place] = Barrier(count, self._launch.num_warpgroups)
        elif words[1] == "arrive":
            barrier, number = (
                self._barrier(operands[1], active),
                self._read(operands[2], TYPES["u32"])[active],
            )
            if not active.all() and self._launch.num_warpgroups > 1:
                raise UnknownError("some threads of a warpgroup arrive: what do the others know?")
            if words[2] != "expect_tx" and (number != 1).any():
                raise UnknownError("a thread arrives several times")
            expected = number if words[2] == "expect_tx" else np.zeros_like(number)
            barrier.arrive(expected, self._shared.order.passed_on(self._index))
        elif words[1:3] == ("try_wait", "parity"):
            barrier = self._barrier(operands[1], active)
            parity = self._same(self._read(operands[2], TYPES["u32"]))
            if barrier.phase % 2 == parity and not barrier.pending:
                barrier.land(self._shared)
            if barrier.phase % 2 == parity:
                missing = f"{barrier.pending} have not arrived, {barrier.num_bytes} bytes are not there"
                raise _Waits(f"waits forever: {missing}")
            self._shared.order.learned(self._index, barrier.known)
        else:
            raise UnknownError("an instruction")

    def _barrier(self, operand: str, threads: np.ndarray) -> Barrier:
        barrier = self._barriers.get(self._same(self._addresses(operand)[threads]))
        if barrier is None or not barrier.is_known:
            raise FaultError("uses a barrier that was not made, fenced and passed on by a bar.sync before")
        return barrier

    # The copy engine.

    def _cp(self, words, operands, active) -> None:
        if words[2] != "bulk":
            return self._copy_by_threads(words, operands, active)
        if "commit_group" in words:
            return self._stores.append([])
        if "wait_group" in words:
            return self._wait_for_stores(int(operands[0]), "read" in words)
        for thread in np.flatnonzero(active).tolist():
            if "bulk_group" in words:
                store = self._copy(operands[0], operands[1], operands[2:], thread)
                self._shared.begin_read(store.places, self._index)
                if not self._launch.lands_late:
                    store.array[store.offsets] = self._shared.data[store.places]
                self._stores[-1].append(store)
            else:
                barrier = self._barrier(operands[-1], np.array([thread]))
                load = self._copy(operands[1], operands[0], operands[2:-1], thread)
                self._shared.begin_write(load.places, self._warp[thread])
                barrier.loads.append(load)
                if not self._launch.lands_late:
                    barrier.land(self._shared)

    def _copy_by_threads(self, words, operands, active) -> None:
        if words == ("cp", "async", "commit_group"):
            self._thread_copies.commit()
        elif words == ("cp", "async", "wait_group"):
            self._thread_copies.wait(int(operands[0]))
        elif words[2:] in (("cg", "shared", "global"), ("ca", "shared", "global")):
            num_bytes = int(operands[2])
            addresses, sources = (self._addresses(operand)[active] for operand in operands[:2])
            if (addresses % num_bytes).any():
                raise FaultError(f"copies {num_bytes} bytes to where they are not aligned")
            values = self._launch.memory.read_exactly(sources, num_bytes)
            places = addresses[:, None] + np.arange(num_bytes)
            self._thread_copies.begin(places, values, self._warp[active])
        else:
            raise UnknownError("an instruction")

    def _copy(self, place: str, shared: str, length: Sequence[str], thread: int) -> Copy:
        """Between a tensor's box, or `length` bytes at an address, and shared memory."""
        address = int(self._addresses(shared)[thread])
        if tensor := _TENSOR.fullmatch(place):
            nth = int(self._read(tensor[1], TYPES["u64"])[thread]) % (1 << 20) // _DESCRIPTOR_BYTES
            first = [int(self._read(name, TYPES["s32"])[thread]) for name in split(tensor[2])]
            return tensor_copy(*self._launch.tensors[nth], tuple(reversed(first)), address)
        num_bytes = int(self._read(length[0], TYPES["u32"])[thread])
        target = int(self._addresses(place)[thread])
        if num_bytes % 16 or address % 16 or target % 16:
            raise FaultError(
                f"copies {num_bytes} bytes between {address} and {target}, expected multiples of 16"
            )
        array, offset = self._launch.memory.find(target, num_bytes)
        return Copy(address + np.arange(num_bytes), array, offset + np.arange(num_bytes))

    def _wait_for_stores(self, num_groups: int, is_read_only: bool, is_end: bool = False) -> None:
        """Lets all but the last `num_groups` groups read, and if not `is_read_only`, also write."""
        committed = self._stores[: len(self._stores) - 1 - num_groups] if not is_end else self._stores
        for store in (store for group in committed for store in group):
            if store.taken is None and not is_end:
                store.taken = self._shared.data[store.places]
                self._shared.end_read(store.places, self._index)
            if self._launch.lands_late and not is_read_only and store.taken is not None:
                store.array[store.offsets] = store.taken
        if not is_read_only:
            del self._stores[: len(committed)]

    # Tensor cores.

    def _mma(self, words, operands, active) -> None:
        if not active.all():
            raise FaultError("multiplies in some threads only, expected all")
        a, b = (
            np.stack([self._read(name, TYPES["b32"]) for name in split(operand)]) for operand in operands[1:3]
        )
        product = tensor_cores.product_of_registers(a, b, tensor_cores.mma_dtype(words))
        totals = [
            self._read(name, TYPES["f32"]) + product[tensor_cores.accumulator_place(nth)]
            for nth, name in enumerate(split(operands[3]))
        ]
        for name, total in zip(split(operands[0]), totals, strict=True):
            self._write(name, total, active)

    def _wgmma(self, words, operands, active) -> None:
        if words[1] == "fence":
            self._unfenced.clear()
        elif words[1] == "commit_group":
            self._products.append([])
        elif words[1] == "wait_group":
            num_groups = int(operands[0])
            while len(self._products) - 1 > num_groups:
                for product in self._products.pop(0):
                    if self._launch.lands_late:
                        self._multiply(product)
                    for places in _in_memory(product):
                        self._shared.end_read(places, self._index)
        else:
            self._begin_product(words, operands)

    def _begin_product(self, words, operands) -> None:
        num_columns, dtype = tensor_cores.product_shape(words)
        accumulators, left = split(operands[0]), split(operands[1])
        if operands[3:6] != ("1", "1", "1"):
            raise UnknownError("a product")
        *of_left, of_right = (transposed == "1" for transposed in operands[6:])
        in_registers = left if operands[1].startswith("{") else []
        if changed := self._unfenced.intersection([*accumulators, *in_registers]):
            raise FaultError(
                f"multiplies {sorted(changed)}, which were written without a wgmma.fence after it"
            )

        def places_of(factor: str, num_rows: int, is_transposed: bool) -> np.ndarray:
            descriptor = self._same(self._read(factor, TYPES["u64"]))
            return tensor_cores.operand_places(descriptor, num_rows, is_transposed)

        a = in_registers or places_of(operands[1], tensor_cores.ROWS, *of_left)
        product = _Product(a, places_of(operands[2], num_columns, of_right), accumulators, dtype)
        for each in _in_memory(product):
            self._shared.begin_read(each, self._index)
        if not self._launch.lands_late:
            self._multiply(product)
        self._products[-1].append(product)

    def _multiply(self, product: _Product) -> None:
        b = tensor_cores.numbers(self._shared.data, product.b, product.dtype)
        if isinstance(product.a, list):
            registers = np.stack([self._read(name, TYPES["b32"]) for name in product.a])
            a = tensor_cores.factor_of_registers(registers, product.dtype)
        else:
            a = tensor_cores.numbers(self._shared.data, product.a, product.dtype)
        result = a @ b.T
        for nth, name in enumerate(product.accumulators):
            row, column = tensor_cores.accumulator_place(nth)
            total = self._read(name, TYPES["f32"]) + result[row, column]
            self._registers[name] = total.view(np.uint32).astype(np.uint64)


def _is_shared(words: Sequence[str], addresses: np.ndarray) -> bool:
    """Tells of addresses whether they are of shared memory, else of global memory."""
    if words[1] in ("shared", "global"):
        return words[1] == "shared"
    if words[1] in ("local", "const"):
        raise UnknownError("a load or a store")
    return bool((addresses < GLOBAL).all())  # a generic address is one of either


def _in_memory(product: _Product) -> list[np.ndarray]:
    """The places of its factors."""
    return [each for each in product[:2] if isinstance(each, np.ndarray)]
