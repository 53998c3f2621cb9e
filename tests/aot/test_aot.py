"""The gate of the compiled kernels (`tests.aot`): reading dumps, judging costs. `make aot` compiles."""

import dataclasses
import re

import pytest

from pallas_kernels.mosaic_gpu.decode_budget import programs_per_sm
from pallas_kernels.mosaic_gpu.decode_plan import tiling_of
from tests.aot import gpu
from tests.aot.alignment import tma_alignment
from tests.aot.budget import Budget, CompileCase
from tests.aot.compiling import ProgramCost
from tests.aot.descriptors import Descriptor, read_host_code
from tests.aot.dump import KernelCost, read_kernels
from tests.aot.hlo import kernel_calls, num_copies
from tests.aot.kernel_cases import CASES as KERNEL_CASES

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_append_kv_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for _append_kv_mosaic_gpu_kernel
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 42 registers, used 2 barriers, 1 bytes smem
"""
SASS = """
   -:2:-:Y:02        /*0530*/                   @UP3 UTMALDG.3D [UR16], [UR6]
   -:2:-:Y:02        /*0660*/                   @UP1 UTMALDG.3D [UR8], [UR4]
   -:2:-:Y:02        /*08b0*/                   @UP1 UTMASTG.4D [UR16], [UR4]
   -:2:-:Y:02        /*0900*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24
   -:2:-:Y:02        /*0910*/                   HMMA.16816.F32.BF16 R8, R4, R16, RZ
   -:2:-:Y:02        /*0920*/                   HMMA.16816.F32.BF16 R8, R20, R18, R8
   -:2:-:Y:02        /*0930*/                   LDGSTS.E.BYPASS.128 [R61], desc[UR16][R8.64]
"""
PASSES = """
    %1 = gpu.launch async [%2] blocks(%3, %4, %5) in (%6 = %c1, %7 = %8, %9 = %c1) threads(%10) \
in (%13 = %c128) dynamic_shared_memory_size %mpmd_map3A_1 {
    %1 = gpu.launch async [%2] blocks(%3, %4, %5) in (%6 = %c1, %7 = %c512_0, %8 = %c1) threads(%10) \
in (%12 = %c128) dynamic_shared_memory_size %c4104_i32 {
// -----// IR Dump Before ReconcileUnrealizedCastsPass: reconcile-unrealized-casts //----- //
    %8 = llvm.mlir.constant(7 : i64) : i64 loc(#loc1)
    %9 = llvm.mlir.constant(2 : i64) : i64 loc(#loc1)
    %10 = llvm.mlir.constant(128 : i64) : i64 loc(#loc1)
    %11 = llvm.mlir.constant(64 : i64) : i64 loc(#loc1)
    %12 = llvm.mlir.constant(1 : i64) : i64 loc(#loc1)
    llvm.store %10, %21 : i64, !llvm.ptr loc(#loc1)
    llvm.store %11, %22 : i64, !llvm.ptr loc(#loc1)
    llvm.store %11, %23 : i64, !llvm.ptr loc(#loc1)
    llvm.store %12, %24 : i64, !llvm.ptr loc(#loc1)
    llvm.store %9, %25 : i64, !llvm.ptr loc(#loc1)
    llvm.store %11, %26 : i64, !llvm.ptr loc(#loc1)
    llvm.call @mosaic_gpu_init_tma_desc(%30, %31, %8, %9, %32, %33, %10, %34) : (!llvm.ptr) -> () loc(#loc1)
"""
# Two slots of a ring, the second one and then each in turn; `stride` bytes lie between them.
PTX = """
	mov.b64 	%rd1, __dynamic_shmem__0;
	cvt.u32.u64 	%r1, %rd1;
	add.s32 	%r2, %r1, {second};
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd9, \
{{%r8,%r9}}], [%r7];
	mov.b32 	%r3, 0;
$L__BB0_1:
	and.b32 	%r4, %r3, 1;
	mul.wide.u32 	%rd2, %r4, {stride};
	add.s64 	%rd3, %rd1, %rd2;
	cvt.u32.u64 	%r5, %rd3;
	@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+{plus}], [%rd9, \
{{%r8,%r9}} ], [%r7];
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	ex2.approx.f32 	%r6, %r6;
	fence.proxy.async.shared::cta;
	@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd8], [{source}], 128;
	add.s32 	%r3, %r3, 1;
	bra 	$L__BB0_1;
"""
BUDGET = Budget(
    registers=64,
    shared_memory=4104,
    min_wgmma=2,
    min_mma=3,
    min_tma=2,
    min_thread_copies=7,
    min_fences=2,
    temporary_bytes=8,
)
KERNEL = KernelCost(
    "decode_0",
    registers=64,
    spill_bytes=0,
    shared_memory=4104,
    wgmma=2,
    mma=3,
    wgmma_groups=2,
    wgmma_waits=2,
    tma=2,
    tma_alignment=128,
    grid=(2**31 - 1, 65535, 65535),
    tanh_approx=0,
    fences=2,
    serialized=0,
    descriptor_faults=(),
    thread_copies=7,
)
CASE = CompileCase("decode", lambda: None, tuple, BUDGET, kernels=("paged_decode", "copy_blocks"))
COST = ProgramCost(
    (KERNEL,),
    temporary_bytes=8,
    pool_copies=0,
    missing_alias_bytes=0,
    called=("copy_blocks", "paged_decode", "paged_decode"),
    collectives=(),
)


def write_dump(folder, stores=0, loads=0):
    (folder / "append_kv_0.ptxas").write_text(PTXAS.format(stores=stores, loads=loads))
    (folder / "append_kv_0.sass_ctrl").write_text(SASS)
    (folder / "append_kv_0.mlir-passes.log").write_text(PASSES)
    (folder / "append_kv_0.ptx").write_text(ptx())


def ptx(second=256, stride=256, plus=0, source="%rd1"):
    return PTX.format(second=second, stride=stride, plus=plus, source=source)


def test_a_dump_is_read(tmp_path):
    write_dump(tmp_path, stores=16, loads=20)
    (kernel,) = read_kernels(tmp_path)
    counts = dict(tanh_approx=0, fences=1, serialized=0, descriptor_faults=(), thread_copies=1)
    assert kernel == KernelCost("append_kv_0", 42, 36, 4104, 1, 2, 1, 1, 2, 256, grid=(1, 512, 1), **counts)


def test_the_descriptors_of_copies_are_read(tmp_path):
    descriptor = Descriptor(width=2, sizes=(128, 64), strides=(64, 1), box=(2, 64), swizzle=128)
    assert read_host_code(PASSES).descriptors == (descriptor,) and descriptor.faults() == []
    with pytest.raises(ValueError, match="cannot read the TMA descriptor of 'llvm.call"):
        read_host_code(PASSES.replace("llvm.store %10, %21", "llvm.store %40, %21"))
    write_dump(tmp_path)
    (tmp_path / "append_kv_0.mlir-passes.log").write_text(PASSES.replace("llvm.call", "other.call"))
    with pytest.raises(ValueError, match="append_kv_0 loads by TMA, and no descriptor was found"):
        read_kernels(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (dict(strides=(512, 256, 64, 32, 16, 1), box=(1, 1, 1, 1, 1, 8)), "6 axes, at most 5"),
        (dict(box=(257, 64)), r"a box of \(257, 64\), at most 256 each"),
        (dict(strides=(60, 1)), r"strides of \(60, 1\) elements of 2 bytes, expected multiples of 16 bytes"),
        (dict(strides=(64, 2)), r"strides of \(64, 2\) elements of 2 bytes, .* 1 element for the last"),
        (dict(box=(2, 60)), "rows of 120 bytes, expected multiples of 16"),
        (dict(box=(2, 128)), "rows of 256 bytes, at most the 128 of the swizzle"),
    ],
)
def test_a_descriptor_that_cuda_refuses_is_found(change, fault):
    descriptor = dataclasses.replace(Descriptor(2, (128, 64), (64, 1), (2, 64), 128), **change)
    (found,) = descriptor.faults()
    assert re.match(fault, found)


def test_what_tensor_cores_multiply_without_a_wait_is_found(tmp_path):
    """The interpreter has the product at once, so that the race detector does not see it."""
    write_dump(tmp_path)
    file = tmp_path / "append_kv_0.ptx"
    file.write_text(file.read_text().replace("\twgmma.wait_group.sync.aligned 0;\n", ""))
    (kernel,) = read_kernels(tmp_path)
    assert (kernel.wgmma_groups, kernel.wgmma_waits) == (1, 0)


def test_an_approximate_tanh_is_found(tmp_path):
    write_dump(tmp_path)
    file = tmp_path / "append_kv_0.ptx"
    file.write_text(file.read_text() + "\ttanh.approx.f32 \t%r6, %r6;\n")
    assert read_kernels(tmp_path)[0].tanh_approx == 1


def test_products_that_are_serialized_are_found(tmp_path):
    write_dump(tmp_path)
    file = tmp_path / "append_kv_0.ptxas"
    note = "wgmma.mma_async instructions are serialized due to insufficient register resources"
    file.write_text(f"{file.read_text()}ptxas info    : (C7510) Potential Performance Loss: {note}\n")
    assert read_kernels(tmp_path)[0].serialized == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 256),
        ({"stride": 4096, "second": 4096}, 1024),
        ({"second": 32}, 32),
        ({"stride": 96}, 32),
        ({"plus": 64}, 64),
        ({"source": "%r3"}, 1),  # a counter
        ({"source": "%rd2"}, 256),
        ({"source": "%r6"}, 1),  # of which nothing is known
    ],
)
def test_the_alignment_of_copies_is_read(changes, expected):
    assert tma_alignment(ptx(**changes)) == expected


def test_a_kernel_whose_copies_are_not_found_is_refused():
    with pytest.raises(ValueError, match="no TMA copy that this reader knows"):
        tma_alignment(ptx().replace("cp.async.bulk", "cp.async.other"))


def test_a_dump_without_disassembly_is_refused(tmp_path):
    write_dump(tmp_path)
    (tmp_path / "append_kv_0.sass_ctrl").unlink()
    with pytest.raises(ValueError, match="nvdisasm"):
        read_kernels(tmp_path)


def test_a_report_that_does_not_name_registers_is_refused(tmp_path):
    write_dump(tmp_path)
    (tmp_path / "append_kv_0.ptxas").write_text("ptxas info    : 0 bytes gmem\n")
    with pytest.raises(ValueError, match="cannot read registers"):
        read_kernels(tmp_path)


def test_a_program_at_its_budget_passes():
    assert gpu.failures(COST, CASE) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"registers": 65}, "65 registers, at most 64"),
        ({"shared_memory": 4105}, "4105 bytes of shared memory, at most 4104"),
        ({"spill_bytes": 4}, "4 spilled bytes, at most 0"),
        ({"wgmma": 1}, "1 HGMMA, at least 2"),
        ({"mma": 2}, "2 HMMA, at least 3"),
        ({"tma": 1}, "1 UTMALDG, at least 2"),
        ({"thread_copies": 6}, "6 LDGSTS, at least 7"),
        ({"fences": 1}, "1 fences, at least 2"),
        (
            {"tma_alignment": 32},
            "decode_0 copies to or from shared memory at multiples of 32 bytes, expected of 128",
        ),
        (
            {"grid": (1, 65536, 1)},
            "decode_0 has a grid of (1, 65536, 1), at most (2147483647, 65535, 65535)",
        ),
        (
            {"grid": (1, 1, 65536)},
            "decode_0 has a grid of (1, 1, 65536), at most (2147483647, 65535, 65535)",
        ),
        ({"wgmma_waits": 1}, "decode_0 waits for wgmma 1 times, at least 2"),
        ({"wgmma_groups": 0, "wgmma_waits": 0}, "decode_0 waits for wgmma 0 times, at least 1"),
        ({"tanh_approx": 4}, "decode_0 has 4 tanh.approx, which is 5e-4 off"),
        ({"descriptor_faults": ("6 axes",)}, "decode_0 has a TMA descriptor with 6 axes"),
    ],
)
def test_a_kernel_beyond_its_budget_fails(change, found):
    kernels = (dataclasses.replace(KERNEL, **change),)
    assert gpu.failures(dataclasses.replace(COST, kernels=kernels), CASE) == [found]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"temporary_bytes": 9}, "9 temporary bytes, at most 8"),
        ({"pool_copies": 1}, "copies a pool 1 times"),
        ({"missing_alias_bytes": 512}, "512 bytes not updated in place"),
        ({"called": ("paged_decode",)}, "does not call copy_blocks"),
        ({"collectives": ("all-gather",)}, "moves arrays between devices: all-gather"),
    ],
)
def test_a_program_beyond_its_budget_fails(change, found):
    assert gpu.failures(dataclasses.replace(COST, **change), CASE) == [found]


def test_every_kernel_is_demanded_by_name():
    """That its name is in the folder says little: what is compiled may not be called."""
    decodes = {"append_kv", "append_scaled", "merge_attention", "paged_decode", "paged_prefill"}
    names = decodes | {"copy_blocks", "gather_blocks", "scatter_blocks"}
    assert {name for case in KERNEL_CASES for name in case.kernels} == names
    assert all(case.kernels for case in KERNEL_CASES)
    (loop,) = gpu.chosen(["decode_loop"])
    assert {"copy_blocks", "merge_attention", "paged_decode"} == {*loop.kernels}


def test_the_kernels_that_a_program_calls_are_read():
    hlo = """
  %k.1 = f32[8] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/extend/copy_blocks/mpmd_map"}
  %k.2 = f32[8] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="paged_decode/mpmd_map"}
  %k.3 = f32[8] custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/merge_attention/dot"}
  %k.4 = f32[8] fusion(%k.2), kind=kLoop, metadata={op_name="jit(f)/append_kv/mpmd_map"}
"""  # noqa: E501
    assert kernel_calls(hlo) == ["copy_blocks", "paged_decode"]


def test_of_several_kernels_the_largest_and_the_sums_count():
    other = dataclasses.replace(
        KERNEL, name="merge_0", registers=70, spill_bytes=1, shared_memory=5, wgmma=3, tma=4, fences=5
    )
    cost = dataclasses.replace(COST, kernels=(KERNEL, other))
    assert gpu.totals(cost) == (70, 1, 4104, 5, 6, 6, 14, 7)


def test_copies_as_big_as_a_pool_are_counted():
    hlo = """
  %copy.1 = bf16[64,8,16,128]{3,2,1,0} copy(%param_0)
  %copy.2 = bf16[63,8,16,128]{3,2,1,0} copy(%param_1)
  %copy-start.3 = (bf16[64,8,16,128]{3,2,1,0}, bf16[64,8,16,128]{3,2,1,0}, u32[]) copy-start(%param_2)
  %fusion.4 = bf16[64,8,16,128]{3,2,1,0} fusion(%copy.1), kind=kLoop
"""
    assert num_copies(hlo, at_least=64 * 8 * 16 * 128) == 2


def test_budgets_are_what_the_kernel_states():
    """By hand: 64 KiB of rings, 7 of lanes, the rest; 2 products of 8; a query in 2 copies, 6 of 4 pieces.

    Three parts of 8 lanes for each of the three programs on an SM.
    """
    budgets = {case.name: case.budget for case in KERNEL_CASES}
    expected = Budget(
        registers=128,
        shared_memory=65_536 + 7_168 + 3_328,
        min_wgmma=16,
        min_tma=2 + 24 + 10,
        min_fences=6,
        temporary_bytes=1_000_000 + 3 * (132 * 3) * 8 * 128 * 4,
    )
    assert budgets["decode_32_rows_group_4"] == expected
    whole = dataclasses.replace(expected, min_tma=2 + 24, min_fences=3)
    assert budgets["decode_128_rows_group_1"] == expected
    assert budgets["decode_70000_rows"] == dataclasses.replace(whole, temporary_bytes=20_000_000)
    of_16 = dict(
        registers=144, shared_memory=83_200, temporary_bytes=1_000_000 + 3 * (132 * 2) * 16 * 128 * 4
    )
    assert budgets["decode_group_16"] == dataclasses.replace(expected, **of_16)
    # mma for every 8 lanes, and a fence after each of two products.
    parts = 3 * (148 * 3) * 8 * 128 * 4
    by_mma = dict(min_wgmma=0, min_mma=16, min_fences=8, temporary_bytes=1_000_000 + parts)
    assert budgets["b200_decode_32_rows_group_4"] == dataclasses.replace(expected, **by_mma)
    assert budgets["b200_decode_8_queries_group_8"].min_mma == 64
    # One stage: a tile of 64 KiB, 16 lanes of 1,664 bytes, the rest.
    assert budgets["rtx_decode_8_queries_head_256"].shared_memory == 65_536 + 26_624 + 3_328


def test_as_many_programs_as_a_plan_counts_on_fit_into_the_registers_of_an_sm():
    """`aot` holds each case to its budget, and the budget fits the plan. Threads get registers by eights."""
    cases = [case for case in KERNEL_CASES if "paged_decode" in case.kernels]
    assert cases
    programs = {}
    for case in cases:
        q, k_pool, *_ = case.arguments()
        _, num_queries, _, group_size, head_dim = q.shape
        tiling = tiling_of(num_queries, group_size, head_dim, k_pool.shape[2], k_pool.dtype.itemsize)
        num_programs = programs[case.name] = programs_per_sm(tiling, head_dim, case.target.gpu)
        assert num_programs * 128 * (-(-case.budget.registers // 8) * 8) <= 65536, case.name
        shared_memory = num_programs * (case.budget.shared_memory + 1024)
        assert shared_memory <= case.target.gpu.shared_memory + 1024, case.name
    # By shared memory, by it, by registers, by them with pieces of 8 tokens, by both.
    names = ("32_rows_group_4", "group_16", "head_64", "head_64_block_24", "8_queries_head_256")
    assert [programs[f"decode_{name}"] for name in names] == [3, 2, 5, 4, 1]


def test_case_names_differ_and_words_choose():
    names = [case.name for case in gpu.CASES]
    assert len(set(names)) == len(names)
    assert [case.name for case in gpu.chosen(["append_64"])] == ["append_64"]
    assert gpu.chosen([]) == list(gpu.CASES)
