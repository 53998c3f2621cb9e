"""The emulator of compiled kernels, on PTX of a few lines; `make aot` runs it on kernels."""

import numpy as np
import pytest

from tests.aot import emulated
from tests.aot.descriptors import Descriptor, HostCode, read_host_code
from tests.aot.emulated_cases import Case, cases
from tests.aot.emulator import tensor_cores
from tests.aot.emulator.cta import Cta, Launch
from tests.aot.emulator.memory import FaultError, GlobalMemory, UnknownError
from tests.aot.emulator.program import parse

KERNEL = """
.visible .entry kernel(
	.param .u64 .ptr .align 256 kernel_param_0,
	.param .align 64 .b8 kernel_param_1[128]
)
{{
	.reg .pred 	%p<9>;
	.shared .align 16 .b8 __dynamic_shmem__0;
	ld.param::entry.b64 	%rd1, [kernel_param_0];
	mov.b64 	%rd2, kernel_param_1;
	mov.b64 	%rd3, __dynamic_shmem__0;
	mov.u32 	%r1, %tid.x;
	elect.sync 	%r2|%p1, -1;
	setp.lt.and.u32 	%p1, %r1, 32, %p1; // one thread
	mul.wide.u32 	%rd4, %r1, 4;
	add.s64 	%rd5, %rd3, %rd4; // a thread's word of shared memory
	.loc	1 7 0
	{body}
	ret;
$L__func_end0:
}}
	.file	1 "/some/where/kernel.py"
"""
FENCE, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"
COPY_OUT = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%rd3], 512;"
WAIT_OUT = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
OUT = f"st.shared.b32 [%rd5], %r9; {FENCE} {BARRIER} {COPY_OUT} {WAIT_OUT}"
# A barrier after 4 KiB of data, and a copy of the tensor that it waits for.
MAKE = f"@%p1 mbarrier.init.shared::cta.b64 [%rd3+4096], 128; fence.mbarrier_init.release.cluster; {BARRIER}"
EXPECT = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%rd3+4096], 4; bar.sync 1, 128;"
LOAD = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
    "[%rd3], [%rd2, {0,0}], [%rd3+4096];"
)
AWAIT = """{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%rd3+4096], 0, 1000;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}"""
WORDS = np.arange(128, dtype=np.int32)
HALVES = Descriptor(width=2, sizes=(9, 64), strides=(64, 1), box=(4, 64), swizzle=128)
MODELS = pytest.mark.parametrize("lands_late", [False, True])


def run(body, lands_late=False, tensor=HALVES, source=None, num_warpgroups=1):
    """What a kernel leaves in 128 words of global memory."""
    out, memory = np.full(128, -1, np.int32), GlobalMemory()
    source = np.arange(9 * 64, dtype=np.int16) if source is None else source
    tensors = [(tensor, source.reshape(-1).view(np.uint8))]
    program = parse(KERNEL.format(body=body))
    launch = Launch(program, memory, [memory.add(out)], tensors, 4104, lands_late, num_warpgroups)
    Cta(launch, index=3).run()
    return out


def refused(expected, body, **options):
    with pytest.raises(FaultError, match=expected):
        run(body, **options)


@MODELS
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mad.lo.s32 %r9, %r1, -3, 7;", 7 - 3 * WORDS),
        ("mul.wide.s32 %rd9, %r1, -65536; shr.s64 %rd9, %rd9, 16; cvt.u32.u64 %r9, %rd9;", -WORDS),
        ("mul.hi.u32 %r9, %r1, 0x80000000;", WORDS // 2),
        ("sub.s32 %r8, %r1, 64; div.s32 %r9, %r8, 7;", np.trunc((WORDS - 64) / 7).astype(np.int32)),
        ("sub.s32 %r8, %r1, 64; shr.s32 %r9, %r8, 2;", (WORDS - 64) >> 2),
        ("shl.b32 %r9, %r1, 32;", WORDS * 0),
        ("setp.gt.s32 %p2, %r1, 9; selp.b32 %r9, %r1, 5, %p2;", np.where(WORDS > 9, WORDS, 5)),
        ("mov.b32 %r9, 1; @!%p1 mov.b32 %r9, 2;", WORDS * 0 + 2 - (WORDS == 0).astype(np.int32)),
        (
            "mul.lo.s32 %r8, %r1, 0x2000100; prmt.b32 %r9, %r8, 0x12345678, 0xB471U;",
            np.where(WORDS < 64, 0x781200, 0x781200 - (1 << 24)).astype(np.int32) + WORDS,
        ),
        ("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", WORDS ^ 5),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};", WORDS << 16),
        ("mov.u32 %r9, %ctaid.x;", WORDS * 0 + 3),
        (
            "cvt.rn.f32.s32 %r9, %r1; fma.rn.f32 %r9, %r9, 0f40000000, 0f3F800000;",
            (2 * WORDS + 1).astype(np.float32),
        ),
        ("setp.le.f32 %p2, 0f7FC00000, 0f00000000; selp.b32 %r9, 1, 0, %p2;", WORDS * 0),
        ("cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000;", WORDS * 0 + 0x3F803F82),
        ("cvt.f32.bf16 %r9, 0x4301;", WORDS * 0 + 0x43010000),
        ("{\n\t.reg .b32 s<2>;\n\tcvt.rn.f16x2.e4m3x2 %r9, 0x7E38;\n\t}\n", WORDS * 0 + 0x5F003C00),
        ("sub.bf16x2 %r9, 0x43404301, 0x43004300;", WORDS * 0 + 0x42803F80),
        (
            "cvt.rn.f32.s32 %r9, %r1; mov.b64 %rd9, {%r9, 0f3F800000}; fma.rn.f32x2 %rd9, %rd9, %rd9, %rd9;"
            "mov.b64 {%r9, %r8}, %rd9;",
            (WORDS * WORDS + WORDS).astype(np.float32),
        ),
    ],
)
def test_threads_compute(body, expected, lands_late):
    np.testing.assert_array_equal(run(body + OUT, lands_late), expected.view(np.int32))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_of_16_bits(trans):
    """A matrix goes to the registers of a warp and back, as it is or turned."""
    rows = "and.b32 %r8, %r1, 7; mul.wide.u32 %rd8, %r8, 16; add.s64 %rd8, %rd3, %rd8;"
    load, store = (f"{name}matrix.sync.aligned.m8n8.x1{trans}.shared.b16 " for name in ("ld", "st"))
    both = f"st.shared.b32 [%rd5], %r1; {BARRIER} {rows} {load} {{%r9}}, [%rd8]; {BARRIER}"
    matrix = np.arange(32, dtype=np.int32).view(np.int16).reshape(8, 8)
    matrix = np.ascontiguousarray(matrix.T if trans else matrix)
    np.testing.assert_array_equal(run(both + OUT)[:32], matrix.view(np.int32).reshape(-1))
    back = f"{both} setp.lt.u32 %p2, %r1, 32; mov.b32 %r7, -1; st.shared.b32 [%rd5], %r7; {BARRIER}"
    found = run(f"{back} {store} [%rd8], {{%r9}}; {FENCE} {BARRIER} {COPY_OUT} {WAIT_OUT}")
    np.testing.assert_array_equal(found[:32], WORDS[:32])


@MODELS
def test_loops_end_and_endless_ones_are_noticed(lands_late):
    loop = "mov.b32 %r9, 0;\n$L1:\nadd.s32 %r9, %r9, 1;\nsetp.lt.s32 %p2, %r9, {end};\n@%p2 bra $L1;\n" + OUT
    assert (run(loop.format(end=5), lands_late) == 5).all()
    refused("not at its end after 100000 instructions", loop.replace("{end}", "2147483647"))


def test_warps_must_wait_for_each_other():
    other = "xor.b32 %r8, %r1, 32; mul.wide.u32 %rd8, %r8, 4; add.s64 %rd8, %rd3, %rd8;"
    store, load = "st.shared.b32 [%rd5], %r1;", "ld.shared.b32 %r9, [%rd8];"
    good = f"{other} {store} {BARRIER} {load} {BARRIER} {OUT}"
    np.testing.assert_array_equal(run(good), WORDS ^ 32)
    refused(
        "kernel.py:7: ld.shared.*reads what another warp wrote", f"{other} {store} {load} {BARRIER} {OUT}"
    )
    refused("st.shared.*writes what another warp read", f"{other} {store} {BARRIER} {load} {OUT}")
    refused("another warp wrote", "st.shared.b32 [%rd3], %r1;")
    refused("barrier of some threads", f"@%p1 {BARRIER}")
    refused("branches in some threads", f"@%p1 bra $L1;\n$L1:\n{OUT}")


@MODELS
def test_copies_see_what_was_fenced_and_passed_on(lands_late):
    store = "st.shared.b32 [%rd5], %r1;"
    for lacking in (f"{store} {BARRIER}", f"{store} {FENCE}", f"{FENCE} {store} {BARRIER}"):
        refused(
            "reads what threads stored, without a fence", lacking + COPY_OUT + WAIT_OUT, lands_late=lands_late
        )
    refused("was never written", COPY_OUT + WAIT_OUT, lands_late=lands_late)
    written = f"{store} {FENCE} {BARRIER} {COPY_OUT}"
    refused("ends while a copy or a product is reading", written, lands_late=lands_late)
    refused("writes what a copy or a product is reading", written + store, lands_late=lands_late)
    refused("without a barrier after the wait", written + WAIT_OUT + store, lands_late=lands_late)
    assert (run(written + WAIT_OUT + BARRIER + store, lands_late) == WORDS).all()
    refused("512 bytes of global memory", written.replace("%rd1]", "%rd1+16]"), lands_late=lands_late)


@MODELS
def test_loads_are_waited_for_and_swizzled(lands_late):
    read = "ld.shared.b32 %r9, [%rd5];"
    found = run(MAKE + EXPECT + LOAD + AWAIT + read + BARRIER + FENCE + OUT, lands_late)
    chunks = np.arange(4 * 64, dtype=np.int16).reshape(4, 8, 8)
    rows = np.stack([chunk[np.arange(8) ^ nth] for nth, chunk in enumerate(chunks)])
    np.testing.assert_array_equal(found, rows.reshape(-1).view(np.int32))
    refused("128 have not arrived", MAKE + LOAD + AWAIT, lands_late=lands_late)
    refused("waits forever: 0 have not arrived, 512 bytes", MAKE + EXPECT + AWAIT, lands_late=lands_late)
    refused("not made, fenced", MAKE.replace(BARRIER, "") + EXPECT, lands_late=lands_late)
    refused(
        "copies the box .* at .6, 0.", MAKE + EXPECT + LOAD.replace("{0,0}", "{0,6}"), lands_late=lands_late
    )
    refused("a multiple of 128", MAKE + EXPECT + LOAD.replace("[%rd3],", "[%rd3+64],"), lands_late=lands_late)
    refused(
        "over what threads stored", "st.shared.b32 [%rd5], %r1;" + MAKE + EXPECT + LOAD, lands_late=lands_late
    )
    refused("over what another warp read", MAKE + EXPECT.replace("bar.sync 1, 128;", read) + LOAD)
    again = f"st.shared.b32 [%rd5], %r1; {FENCE} {BARRIER} {read} {FENCE} {BARRIER}" + LOAD + AWAIT
    run(MAKE + EXPECT + again, lands_late)
    unfenced = again.replace(f"{read} {FENCE}", read)
    refused("over what threads loaded, without a fence", MAKE + EXPECT + unfenced, lands_late=lands_late)
    if lands_late:
        refused("reads what a copy is writing", MAKE + EXPECT + LOAD + read, lands_late=True)
        refused("ends while a copy is writing", MAKE + EXPECT + LOAD, lands_late=True)


@MODELS
def test_threads_copy_in_groups_that_land_in_order(lands_late):
    """What each thread has waited for is its own; a barrier passes it on, and no fence is asked for."""
    own = "add.s64 %rd7, %rd1, %rd4; st.global.b32 [%rd7], %r1; st.shared.b32 [%rd5+512], 5;"
    first, second = (f"cp.async.ca.shared.global [%rd5{at}], [%rd7], 4; {COMMIT}" for at in ("", "+512"))
    other = "xor.b32 %r8, %r1, 32; mul.wide.u32 %rd8, %r8, 4; add.s64 %rd8, %rd3, %rd8;"
    read, last = f"{other} ld.shared.b32 %r9, [%rd8];", f"{wait_group(0)} {BARRIER}"
    out = f"{BARRIER} {FENCE} {BARRIER} {OUT}"
    copy = f"{own} {BARRIER} {first} {second}"
    found = run(f"{copy} {wait_group(1)} {BARRIER} {read} {last} {out}", lands_late)
    np.testing.assert_array_equal(found, WORDS ^ 32)
    refused("another warp wrote", f"{copy} {wait_group(1)} {read} {last} {out}", lands_late=lands_late)
    if lands_late:
        refused("reads what a copy is writing", f"{copy} {wait_group(2)} {BARRIER} {read}", lands_late=True)
        refused("ends while a copy is writing", f"{copy} {wait_group(1)}", lands_late=True)
        refused("writes what a copy is writing", f"{copy} st.shared.b32 [%rd5], %r1;", lands_late=True)
    again = f"{copy} {last} {read} BETWEEN {first} {last}"
    run(again.replace("BETWEEN", BARRIER), lands_late)
    refused("over what another warp used", again.replace("BETWEEN", ""), lands_late=lands_late)
    refused("are not aligned", copy.replace("[%rd7], 4;", "[%rd7], 8;"), lands_late=lands_late)
    refused("out of bounds", copy.replace("[%rd7], 4;", "[%rd7+508], 4;"), lands_late=lands_late)


COMMIT = "cp.async.commit_group;"


def wait_group(num):
    return f"cp.async.wait_group {num};"


PRODUCT = """
	wgmma.fence.sync.aligned;
	{between}
	{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
	{{%r10,%r11,%r12,%r13}}, %rd10, %rd11, p, 1, 1, 0, 0; }}
	wgmma.commit_group.sync.aligned;
"""
ZERO = "".join(f"mov.b32 %r{nth}, 0f00000000;" for nth in range(10, 14))
# Rows of 128 bytes, 8 of them 1,024 bytes apart from the next 8; the second factor begins after 8 KiB.
DESCRIPTORS = f"shr.u64 %rd10, %rd3, 4; or.b64 %rd10, %rd10, {1 << 62 | 64 << 32}; add.s64 %rd11, %rd10, 512;"


@MODELS
def test_products(lands_late):
    rng = np.random.default_rng(0)
    factors = rng.integers(-4, 5, (72, 64)).astype(np.float16)
    tensor = Descriptor(width=2, sizes=(72, 64), strides=(64, 1), box=(72, 64), swizzle=128)
    load = (MAKE + EXPECT + LOAD + AWAIT).replace("+4096", "+9216").replace("], 4;", "], 72;")
    wait = "wgmma.wait_group.sync.aligned 0;"

    def product(after, between=""):
        out, memory = np.full(128, -1, np.int32), GlobalMemory()
        last = f"mov.b32 %r9, %r12; {BARRIER} {FENCE}" + OUT
        program = parse(
            KERNEL.format(body=load + DESCRIPTORS + ZERO + PRODUCT.format(between=between) + after + last)
        )
        tensors = [(tensor, factors.reshape(-1).view(np.uint8))]
        Cta(Launch(program, memory, [memory.add(out)], tensors, 9224, lands_late), index=0).run()
        return out.view(np.float32)

    expected = factors[:64, :16].astype(np.float32) @ factors[64:, :16].T.astype(np.float32)
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4 + 8
    np.testing.assert_array_equal(product(wait), expected[row, 2 * (thread % 4)])
    with pytest.raises(FaultError, match="what a copy or a product is reading"):
        product("")
    with pytest.raises(FaultError, match=r"'%r13'\], which were written without a wgmma.fence after it"):
        product(wait, between=ZERO)


def test_left_factors_in_registers_lie_as_ldmatrix_loads_them():
    factor = np.arange(64 * 16, dtype=np.float16).reshape(64, 16)
    rows = [
        factor[16 * warp + 8 * (matrix & 1) + row, 8 * (matrix >> 1) :][:8]
        for warp, matrix, row in np.ndindex(4, 4, 8)
    ]
    registers = tensor_cores.to_registers(np.stack(rows).view(np.uint8), 4, is_transposed=False)
    np.testing.assert_array_equal(tensor_cores.factor_of_registers(registers, "f16"), factor)


def test_products_of_registers():
    """Warps have 16 rows each, and right factors of their own."""
    rng = np.random.default_rng(0)
    left, right = (
        rng.integers(-4, 5, (64, 16)).astype(np.float16) for _ in range(2)
    )  # [warps * columns, 16]
    matrices = [
        left[16 * warp + 8 * (nth & 1) + row, 8 * (nth >> 1) :][:8] for warp, nth, row in np.ndindex(4, 4, 8)
    ]
    a = tensor_cores.to_registers(np.stack(matrices).view(np.uint8), 4, is_transposed=False)
    right = right[:32].reshape(4, 8, 16)
    columns = [right[warp, row, 8 * nth :][:8] for warp, nth, row in np.ndindex(4, 2, 8)]
    b = tensor_cores.to_registers(np.stack(columns).view(np.uint8), 2, is_transposed=False)
    expected = left.reshape(4, 16, 16).astype(np.float32) @ right.swapaxes(1, 2)
    np.testing.assert_array_equal(tensor_cores.product_of_registers(a, b, "f16"), expected.reshape(64, 8))


def test_mma_adds_to_what_registers_hold():
    name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    both = f"mov.b32 %r8, 0x3F803F80; mov.b32 %r7, 0x40004000; {ZERO} cvt.rn.f32.s32 %r11, %r1;"
    mma = f"{name} {{%r12,%r9,%r10,%r11}}, {{%r8,%r8,%r8,%r8}}, {{%r7,%r7}}, {{%r10,%r11,%r12,%r13}};"
    np.testing.assert_array_equal(run(both + mma + OUT).view(np.float32), WORDS + 32)
    refused("multiplies in some threads only", f"{both} @%p1 {mma}")
    with pytest.raises(UnknownError, match="a product"):
        run(both + mma.replace("m16n8k16", "m16n8k8"))


# The second warpgroup reads what the first one stored, and writes one more.
HAND_OVER = f"""
    {MAKE}
    setp.ge.u32 %p3, %r1, 128;
    setp.eq.u32 %p4, %r1, 128;
    @%p3 bra $L1;
    GIVE
    bra $L2;
$L1:
    TAKE
    ld.shared.b32 %r9, [%rd5+-512];
    add.s32 %r9, %r9, 1;
    st.shared.b32 [%rd5], %r9;
    {FENCE}
    bar.sync 2, 128;
    @%p4 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%rd3+512], 512;
    {WAIT_OUT}
$L2:
"""
GIVE = "st.shared.b32 [%rd5], %r1;"
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [%rd3+4096], 1;"


@MODELS
def test_warpgroups_must_wait_for_each_other(lands_late):
    """Whichever of them the emulator lets run first."""

    def hand_over(give, take):
        return HAND_OVER.replace("GIVE", give).replace("TAKE", take)

    options = dict(lands_late=lands_late, num_warpgroups=2)
    np.testing.assert_array_equal(run(hand_over(GIVE + ARRIVE, AWAIT), **options), WORDS + 1)
    np.testing.assert_array_equal(run(hand_over(GIVE + BARRIER, BARRIER), **options), WORDS + 1)
    for give, take in ((GIVE + ARRIVE, ""), (ARRIVE + GIVE, AWAIT)):
        refused("another warpgroup (wrote|read), without a wait for it", hand_over(give, take), **options)
    refused("waits forever: 128 have not arrived", hand_over(GIVE, AWAIT), **options)
    refused("waits forever for another warpgroup", hand_over(GIVE, BARRIER), **options)
    # A fence that comes after the arrival is not known to those who waited for that.
    read, copy = "ld.shared.b32 %r9, [%rd5+-512];", COPY_OUT.replace("%p1", "%p4")
    for give, fault in (
        (f"{GIVE} {FENCE} {ARRIVE}", None),
        (f"{GIVE} {ARRIVE} {FENCE}", "another warpgroup wrote"),
        (f"{GIVE} {ARRIVE}", "without a fence"),
    ):
        body = hand_over(give, AWAIT).replace(read, f"{copy} mov.b32 %r9, 0;")
        refused(fault, body, **options) if fault else run(body, **options)


@MODELS
def test_each_warpgroup_must_wait_for_copies(lands_late):
    body = f"""
    {MAKE}
    setp.ge.u32 %p3, %r1, 128;
    @%p3 bra $L1;
    {EXPECT} {LOAD} {AWAIT}
    bra $L2;
$L1:
    TAKE
    ld.shared.b32 %r9, [%rd3];
$L2:
"""
    options = dict(lands_late=lands_late, num_warpgroups=2)
    run(body.replace("TAKE", AWAIT), **options)
    fault = "what was copied, without a wait for the copy|copies over what another warpgroup read"
    refused(fault, body.replace("TAKE", ""), **options)


def test_what_is_unknown_is_no_fault():
    for body in (
        "frobnicate.b32 %r9, %r1;",
        "add.f16x2 %r9, %r1, %r1;",
        "st.local.b32 [%rd1], %r1;",
        "cp.async.mbarrier.arrive.shared.b64 [%rd3];",
        "123;",
    ):
        with pytest.raises(UnknownError):
            run(body)


def test_host_code_says_what_a_kernel_gets():
    code = """// -----// IR Dump Before //----- //
    llvm.func @kernel_mosaic_gpu(%arg0: !llvm.ptr loc(unknown), %arg1: !llvm.ptr loc(unknown)) {
    %0 = llvm.mlir.constant(2 : i64) : i64
    %1 = llvm.mlir.constant(1 : i64) : i64
    %2 = llvm.mlir.constant(64 : i64) : i64
    %3 = llvm.mlir.constant(16 : i64) : i64
    %4 = llvm.load %arg1 : !llvm.ptr -> !llvm.ptr
    %5 = llvm.getelementptr %arg1[2] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %6 = llvm.load %5 : !llvm.ptr -> !llvm.ptr
    %7 = llvm.insertvalue %6, %9[0] : !llvm.struct<(ptr, ptr)>
    %8 = llvm.extractvalue %7[0] : !llvm.struct<(ptr, ptr)>
    llvm.store %2, %20 : i64, !llvm.ptr
    llvm.store %1, %21 : i64, !llvm.ptr
    llvm.store %2, %22 : i64, !llvm.ptr
    llvm.call @mosaic_gpu_init_tma_desc(%30, %8, %0, %1, %32, %33, %3, %34) : (!llvm.ptr) -> ()
    llvm.store %4, %40 : !llvm.ptr, !llvm.ptr
    """
    descriptor = Descriptor(width=2, sizes=(64,), strides=(1,), box=(64,), swizzle=16, buffer=2)
    assert read_host_code(code) == HostCode((0,), (descriptor,))


def test_the_gate_says_what_is_wrong_in_the_first_model_that_fails():
    def waits_forever():
        raise FaultError("waits forever")

    want = [np.array([0.0, np.nan, -np.inf], np.float32)]
    for got, found in (
        ([0.0, np.nan, -np.inf], []),
        ([1e-3, np.nan, -np.inf], ["1 of 3 numbers of result 0 are wrong"]),
        ([np.nan, 0.0, np.inf], ["3 of 3 numbers of result 0 are wrong"]),
    ):
        case = Case("a", lambda got=got: [np.array(got, np.float32)], lambda: want, atol=1e-4)
        assert [line.partition(", ")[2] for line in emulated.failures(case)] == found
    expected = ["where copies and products land at once, waits forever"]
    assert emulated.failures(Case("b", waits_forever, lambda: want)) == expected
    got = iter([want, [np.zeros(3, np.float32)]])
    [late] = emulated.failures(Case("c", lambda: next(got), lambda: want))
    assert late.startswith("where copies and products land late, 2 of 3 numbers")


def test_shapes_are_drawn_by_seed_and_chosen_by_words(capsys):
    names = [case.name for case in cases(3, 5)]
    assert len(set(names)) == len(names) == len(cases(0, 5)) + 3
    assert sum("random_5_" in name for name in names) == 3
    found = [case.name for case in emulated.chosen(cases(0, 5), ["decode_plain", "copy_bf16_16x64"])]
    copies = [name for name in names if "copy_bf16_16x64" in name]
    assert found == ["decode_plain", *copies] and len(copies) > 1
    with pytest.raises(SystemExit):
        emulated.main(["no_such_shape"])
    assert "no case has no_such_shape in its name" in capsys.readouterr().err
