"""Bytes that launches move (`tests.aot.traffic`), read from the text of a program."""

import pytest

from tests.aot.hlo_program import parse_hlo
from tests.aot.traffic import Traffic, traffic_of

HLO = """
HloModule jit_step, is_scheduled=true

%sliced (p.0: bf16[4,64], p.1: s32[]) -> bf16[64] {
  %p.0 = bf16[4,64]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,64]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,64}
  ROOT %flat = bf16[64]{0} bitcast(%slice)
}

%nested (p.2: bf16[4,64], p.3: s32[], p.4: f32[64]) -> (f32[64], bf16[64]) {
  %p.2 = bf16[4,64]{1,0} parameter(0)
  %p.3 = s32[] parameter(1)
  %p.4 = f32[64]{0} parameter(2)
  %inner = bf16[64]{0} fusion(%p.2, %p.3), kind=kLoop, calls=%sliced
  %wide = f32[64]{0} convert(%inner)
  %sum = f32[64]{0} add(%wide, %p.4)
  ROOT %both = (f32[64]{0}, bf16[64]{0}) tuple(%sum, %inner)
}

%updated (p.5: bf16[100,64], p.6: bf16[2,64], p.7: s32[2,1]) -> bf16[100,64] {
  %p.5 = bf16[100,64]{1,0} parameter(0)
  %p.6 = bf16[2,64]{1,0} parameter(1)
  %p.7 = s32[2,1]{1,0} parameter(2)
  %set = bf16[100,64]{1,0} scatter(%p.5, %p.7, %p.6), update_window_dims={1}, to_apply=%second
  ROOT %view = bf16[100,64]{1,0} bitcast(%set)
}

%placed (p.8: f32[9,64], p.9: f32[64], p.10: s32[]) -> f32[9,64] {
  %p.8 = f32[9,64]{1,0} parameter(0)
  %p.9 = f32[64]{0} parameter(1)
  %row = f32[1,64]{1,0} bitcast(%p.9)
  %p.10 = s32[] parameter(2)
  ROOT %new = f32[9,64]{1,0} dynamic-update-slice(%p.8, %row, %p.10, %p.10)
}

%called (p.11: bf16[4,64], p.12: bf16[100,64]) -> bf16[2,4] {
  %p.11 = bf16[4,64]{1,0} parameter(0)
  %p.12 = bf16[100,64]{1,0} parameter(1)
  %two_rows = bf16[2,64]{1,0} slice(%p.11), slice={[0:2], [0:64]}
  ROOT %kernel = bf16[2,4]{1,0} custom-call(%two_rows, %p.12), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[4,64], b: bf16[100,64]) -> bf16[100,64] {
  %a = bf16[4,64]{1,0} parameter(0)
  %b = bf16[100,64]{1,0} parameter(1)
  %n = s32[] constant(2)
  %one = bf16[64]{0} fusion(%a, %n), kind=kLoop, calls=%sliced
  %two = (f32[64]{0}, bf16[64]{0}) fusion(%a, %n, %f), kind=kLoop, calls=%nested
  %three = bf16[100,64]{1,0} fusion(%b, %x, %i), kind=kInput, calls=%updated
  %four = f32[9,64]{1,0} fusion(%y, %f, %n), kind=kLoop, calls=%placed
  %five = bf16[1,64]{1,0} dynamic-slice(%a, %n, %n), dynamic_slice_sizes={1,64}
  %six = (bf16[4,4]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$gemm"
  %start = ((bf16[4,64]{1,0}, s32[]), bf16[64]{0}, u32[]) fusion-start(%a, %n), kind=kLoop, calls=%sliced
  %done = bf16[64]{0} fusion-done(%start)
  %copying = (bf16[4,64]{1,0}, bf16[4,64]{1,0}, u32[]) copy-start(%a)
  %seven = bf16[4,4]{1,0} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2"
  %nine = bf16[2,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%called
  ROOT %eight = bf16[100,64]{1,0} copy(%b), metadata={op_name="jit(f)/a=%b"}
}
"""


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("one", 128 + 4, 128),  # a row, and its number
        ("two", 128 + 4 + 256, 256 + 128),  # through the fusion within
        ("three", 256 + 8, 256),  # of the array that is updated nothing is read, and two rows are written
        ("four", 256 + 4, 256),
        ("five", 128, 128),
        ("six", 2 * 512, 32),  # without its workspace
        ("start", 128 + 4, 128),
        ("copying", 512, 512 + 4),
        ("seven", 0, 0),
        ("eight", 12_800, 12_800),
        ("nine", 0, 0),
    ],
)
def test_bytes_of_a_launch(name, read, written):
    program = parse_hlo(HLO)
    entry = program.computations[program.entry]
    assert traffic_of(program, entry, entry[name]) == Traffic(read, written)
