"""The GPU's decode plan fills the GPU, by the model of `fluid_model`; the bars are percent of its ceiling."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.decode_rows import DecodeRows
from pallas_kernels.gpus import A10, A100, B200, GPUS, HOPPER, L4, RTX_50, gpu_of
from pallas_kernels.mosaic_gpu import limits, prefill
from pallas_kernels.mosaic_gpu.decode_budget import max_shared_memory, num_stages, programs_per_sm
from pallas_kernels.mosaic_gpu.decode_plan import TILE_ROWS, Item, plan_decode, tiling_of
from tests.kernels.fluid_model import Gpu, of_ceiling

NUM_HEADS, GROUP_SIZE, BLOCK_SIZE = 8, 4, 16
H200, H20 = (132, 4200.0), (78, 4000.0)
PROGRAM_GB_PER_S = {128: 40.0, 64: 24.0}
K = 1024
LOG_NORMAL = [int(x) for x in np.clip(np.random.default_rng(1).lognormal(8, 1, 128), 64, 128 * K)]
ONE_LONG = [K] * 63 + [128 * K]


def tiles_of(lens: list[int], head_dim: int, num_sms: int) -> tuple[np.ndarray, int]:
    """Tiles of each item of the plan, in order, and the programs that run side by side."""
    tiling = tiling_of(1, GROUP_SIZE, head_dim, BLOCK_SIZE)
    num_slots = num_sms * programs_per_sm(tiling, head_dim, HOPPER)
    num_columns = jnp.asarray([-(-length // BLOCK_SIZE) for length in lens], jnp.int32)
    order = jnp.arange(len(lens), dtype=jnp.int32)
    rows = DecodeRows(order, order * 0, num_columns, num_columns * BLOCK_SIZE - 1, order * 0 + 1)
    sizes = dict(num_columns=max(lens) // BLOCK_SIZE + 1, num_parallel=num_slots // NUM_HEADS)
    items = np.asarray(jax.jit(lambda rows: plan_decode(rows, tiling, **sizes).items)(rows))
    return items[items[:, Item.ROW] >= 0, Item.NUM_TILES], num_slots


@pytest.mark.parametrize(
    "lens, head_dim, device, least",
    [
        pytest.param(ONE_LONG, 128, H200, 93, id="63 x 1k + 1 x 128k"),
        pytest.param([K] * 47 + [128 * K], 128, H200, 93, id="47 x 1k + 1 x 128k"),
        pytest.param(LOG_NORMAL, 128, H200, 95, id="128 log-normal, head_dim 128"),
        pytest.param(LOG_NORMAL, 64, H200, 94, id="128 log-normal, head_dim 64"),
        pytest.param([8 * K] * 50, 128, H200, 86, id="50 x 8k"),
        pytest.param([8 * K] * 32, 128, H20, 85, id="32 x 8k on an H20"),
        pytest.param([8 * K] * 32, 128, H200, 95.5, id="32 x 8k"),
        pytest.param([8 * K] * 8, 128, H200, 85, id="8 x 8k"),
        pytest.param([2 * K] * 8, 128, H200, 58.5, id="8 x 2k"),
    ],
)
def test_a_plan_fills_the_gpu(lens, head_dim, device, least):
    num_sms, gb_per_s = device
    tiles, num_slots = tiles_of(lens, head_dim, num_sms)
    kilobytes = np.repeat(tiles, NUM_HEADS) * (2 * TILE_ROWS * head_dim * 2 / 1e3)
    found = 100 * of_ceiling(kilobytes, Gpu(num_slots, gb_per_s, PROGRAM_GB_PER_S[head_dim]))
    print(f"{found:.1f}% of the ceiling, {len(tiles)} items")
    assert least <= found <= 100


@pytest.mark.parametrize(
    "lens, expected",
    [
        ([8 * K] * 32, [128] * 32),
        ([8 * K] * 8, [22, 22, 22, 22, 22, 18] * 8),
        ([2 * K] * 8, [6, 6, 6, 6, 6, 2] * 8),
        ([20 * BLOCK_SIZE] * 2, [3, 2] * 2),  # runs of less than four tiles do not pay
        ([4 * TILE_ROWS] * 3, [4] * 3),
    ],
)
def test_equal_rows_that_fit_are_cut_into_runs_that_all_run_side_by_side(lens, expected):
    tiles, _ = tiles_of(lens, 128, 132)
    assert tiles.tolist() == expected


def test_a_table_of_few_tiles_is_never_split():
    """There is nothing to look for, no partial result and no merge."""
    order = jnp.arange(3, dtype=jnp.int32)
    rows = DecodeRows(order, order, order + 1, order, order)
    plan = plan_decode(rows, tiling_of(1, 4, 128, 16), num_columns=16, num_parallel=49)
    assert plan.items.shape[0] == 3 and plan.num_parts == 0
    assert plan.items[:, Item.PART].tolist() == [-1] * 3 and plan.first_part.tolist() == [0] * 4


def test_the_gpu_that_is_traced_for_says_how_many_sms_it_has_and_which(monkeypatch):
    assert (limits.num_sms(), limits.target()) == (132, HOPPER)  # there is no GPU
    kind = "NVIDIA Graphics Device"
    device = types.SimpleNamespace(
        platform="gpu", core_count=114, device_kind=kind, compute_capability="12.0"
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert (limits.num_sms(), limits.target()) == (114, RTX_50)
    # A mesh knows names, and a GPU of that name here its compute capability.
    for name, num_cores, expected in (
        (kind, 114, RTX_50),
        ("NVIDIA B200", 148, B200),
        ("NVIDIA L4", 58, L4),
        ("Tesla T4", 40, HOPPER),
    ):
        on_mesh = AbstractDevice(device_kind=name, num_cores=num_cores, platform="gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=on_mesh)):
            assert (limits.num_sms(), limits.target()) == (num_cores, expected)


def test_gpus_are_known_by_name_and_by_compute_capability():
    names = {
        "NVIDIA H100 80GB HBM3": HOPPER,
        "NVIDIA GH200 480GB": HOPPER,
        "NVIDIA B200": B200,
        "NVIDIA GB200": B200,
        "NVIDIA GeForce RTX 5090": RTX_50,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": RTX_50,
        **dict.fromkeys(("NVIDIA A100-SXM4-80GB", "NVIDIA A100X", "GRID A100D-10C", "NVIDIA A30X"), A100),
        "NVIDIA A10G": A10,
        "NVIDIA RTX A6000": A10,
        "NVIDIA GeForce RTX 3090": A10,
        "NVIDIA L4": L4,
        "NVIDIA L40S": L4,
        "NVIDIA GeForce RTX 4090": L4,
        "NVIDIA RTX 6000 Ada Generation": L4,
        **dict.fromkeys(("NVIDIA B300", "Tesla T4", "Tesla V100-SXM2-16GB")),
        **dict.fromkeys(f"Quadro RTX {number}" for number in (3000, 4000, 6000)),
    }
    assert {name: gpu_of(name, None) for name in names} == names
    assert [gpu_of("any", gpu.capability) for gpu in GPUS] == list(GPUS)
    assert gpu_of("NVIDIA B200", "10.3") is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.example)
def test_a_program_of_each_kind_fits_each_gpu(gpu):
    for head_dim in limits.HEAD_DIMS:
        for num_queries in (1, 3, 5, 8):
            tiling = tiling_of(num_queries, 8, head_dim, BLOCK_SIZE)
            is_small = gpu in (A10, L4, RTX_50) and head_dim == 256
            assert num_stages(tiling, head_dim, gpu) == (1 if is_small else 2)
            assert max_shared_memory(tiling, head_dim, gpu) <= gpu.shared_memory
            assert programs_per_sm(tiling, head_dim, gpu) >= 1


def test_a_prefill_that_does_not_fit_the_gpu_is_refused(monkeypatch):
    found = {}
    for gpu in GPUS:
        device = types.SimpleNamespace(
            platform="gpu", device_kind=gpu.example, compute_capability=gpu.capability
        )
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        for head_dim in prefill.HEAD_DIMS:
            pool = jnp.zeros((2, 1, 16, head_dim), jnp.bfloat16)
            if reason := prefill.why_not_prefill(pool):
                found[gpu, head_dim] = reason
    expected = "it needs 118016 bytes of shared memory with head_dim 128, and a GPU like RTX 5090 has 101376"
    by_threads = {
        (gpu, head_dim): f"a GPU like {gpu.example} has no copy engine"
        for gpu in (A100, A10, L4)
        for head_dim in prefill.HEAD_DIMS
    }
    assert found == {(RTX_50, 128): expected, **by_threads}
