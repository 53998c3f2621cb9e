"""PyTorch and FlashInfer 0.7.2 as far as `on_device.torch_sides` calls them, computed by NumPy.

Functions have the parameters of the real ones, by name, order and default, and demand what those demand.
Memory is on "cuda:0" or "cpu"; what is empty is NaN; a graph's launches happen when it is replayed.
"""

import contextlib
import types

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
WORKSPACE_BYTES = 128 << 20  # recommended


class Tensor:
    def __init__(self, values, device="cpu"):
        self.values, self.device = np.asarray(values), device
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def reshape(self, *shape):
        return Tensor(self.values.reshape(*shape), self.device)

    def __getitem__(self, index):
        return Tensor(self.values[index], self.device)

    def float(self):
        return Tensor(self.values.astype(np.float32), self.device)

    def cpu(self):
        return Tensor(self.values.copy())

    def numpy(self):
        assert self.device == "cpu" and self.dtype != BF16
        return self.values


def attended(q, keys, values, scale):
    """`[b, hq, d]`, over rows' keys `[s, h, d]`."""
    out = []
    for row_q, row_k, row_v in zip(q, keys, values, strict=True):
        grouped = row_q.astype(np.float32).reshape(row_k.shape[1], -1, row_q.shape[-1])
        logits = scale * np.einsum("hgd,shd->hgs", grouped, row_k.astype(np.float32))
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out.append(np.einsum("hgs,shd->hgd", weights, row_v.astype(np.float32)).reshape(row_q.shape))
    return np.stack(out).astype(BF16)


def make_torch():
    torch = types.ModuleType("torch")
    torch.bfloat16, torch.int32, torch.uint8 = BF16, np.dtype(np.int32), np.dtype(np.uint8)
    torch.launches = None  # of the graph that is captured

    def launch(work):
        work() if torch.launches is None else torch.launches.append(work)

    class CUDAGraph:
        def __init__(self):
            self.launches = []

        def replay(self):
            for work in self.launches:
                work()

    @contextlib.contextmanager
    def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        torch.launches = cuda_graph.launches
        yield
        torch.launches = None

    torch.launch = launch
    torch.from_dlpack = lambda array: Tensor(array, "cuda:0")
    torch.zeros = lambda size, *, dtype, device="cpu": Tensor(np.zeros(size, dtype), device)
    torch.full = lambda size, fill_value, *, dtype, device="cpu": Tensor(
        np.full(size, fill_value, dtype), device
    )
    torch.empty_like = lambda x: Tensor(np.full(x.shape, np.nan, x.dtype), x.device)
    torch.tensor = lambda data, *, dtype=None, device="cpu": Tensor(np.array(data, dtype), device)
    torch.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda device=None: None,
        CUDAGraph=CUDAGraph,
        graph=graph,
    )
    return torch


def _pages(kv_cache, kv_layout):
    """K and V as `[pages, page_size, h, d]`."""
    assert isinstance(kv_cache, tuple) and kv_layout in ("NHD", "HND")
    return [x.values.swapaxes(1, 2) if kv_layout == "HND" else x.values for x in kv_cache]


def _rows(pages, tables, lens):
    return [
        pages[table].reshape(-1, *pages.shape[2:])[:length]
        for table, length in zip(tables, lens, strict=True)
    ]


def _check_workspace(workspace):
    assert workspace.dtype == np.uint8 and workspace.device == "cuda:0"
    assert workspace.shape[0] >= WORKSPACE_BYTES and not workspace.values[:: 1 << 12].any()


def make_flashinfer(torch):
    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=None,
            paged_kv_indices_buffer=None,
            paged_kv_last_page_len_buffer=None,
            backend="auto",
            jit_args=None,
        ):
            _check_workspace(float_workspace_buffer)
            assert backend in ("fa2", "cudnn") and not use_cuda_graph
            self.kv_layout, self.backend, self.use_tensor_cores = kv_layout, backend, use_tensor_cores
            flashinfer.wrappers.append(self)

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            *,
            q_data_type="float16",
            kv_data_type=None,
            o_data_type=None,
            sm_scale=None,
            non_blocking=True,
            block_tables=None,
            seq_lens=None,
        ):
            assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
            assert indices.values.ndim == 1 and indices.shape[0] == indptr.values[-1]
            self.sizes = num_qo_heads, num_kv_heads, head_dim, page_size
            self.dtypes = q_data_type, kv_data_type or q_data_type
            self.scale = head_dim**-0.5 if sm_scale is None else sm_scale
            starts, ends = indptr.values[:-1], indptr.values[1:]
            self.lens = (ends - starts - 1) * page_size + last_page_len.values
            self.tables = [indices.values[start:end] for start, end in zip(starts, ends, strict=True)]
            # A graph reads the table in place: not one that `plan` would make.
            assert (block_tables is not None) == (self.backend == "cudnn")
            if block_tables is not None:
                assert block_tables.device == "cuda:0" and block_tables.shape[0] == len(self.lens)
                self.tables = block_tables.values

        def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
            pages = _pages(paged_kv_cache, self.kv_layout)
            num_q_heads, num_kv_heads, head_dim, page_size = self.sizes
            assert q.shape == (len(self.lens), num_q_heads, head_dim) == out.shape
            assert all(x.shape[1:] == (page_size, num_kv_heads, head_dim) for x in pages)
            assert (q.dtype, pages[0].dtype) == self.dtypes and pages[1].dtype == pages[0].dtype

            def work():
                rows = [_rows(x, self.tables, self.lens) for x in pages]
                out.values[...] = attended(q.values, *rows, self.scale)

            torch.launch(work)
            return out

    def xqa(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        window_left=-1,
        out=None,
        sinks=None,
        kv_layout="NHD",
    ):
        _check_workspace(workspace_buffer)
        pages = _pages(kv_cache, kv_layout)
        assert query.dtype == out.dtype == pages[0].dtype == pages[1].dtype and query.shape == out.shape
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        assert block_tables.device == seq_lens.device == "cuda:0"
        assert block_tables.shape[0] == seq_lens.shape[0] == query.shape[0]
        assert seq_lens.values.max() <= max_seq_len and query.shape[1] % pages[0].shape[2] == 0

        def work():
            rows = [_rows(x, block_tables.values, seq_lens.values) for x in pages]
            out.values[...] = bmm2_scale * attended(query.values, *rows, bmm1_scale).astype(np.float32)

        torch.launch(work)
        return out

    flashinfer = types.ModuleType("flashinfer")
    flashinfer.wrappers = []
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    flashinfer.decode = types.ModuleType("flashinfer.decode")
    flashinfer.decode.xqa_batch_decode_with_kv_cache = xqa
    flashinfer.jit = types.ModuleType("flashinfer.jit")
    flashinfer.jit.env = types.SimpleNamespace(FLASHINFER_AOT_DIR=None)
    return flashinfer
