"""Names in `experiments.kernel_speed`, as printed and as `--without` and `--only` take them; only Python."""

READ, COPY, FLOOR = "read", "copy", "one tiny kernel"
"""The ceilings."""


OURS, WITH_PLAN = "ours", "ours, plan included"
JAX_TRITON, CUDNN_PAGED = "JAX Triton", "cuDNN paged"
GATHER_CUDNN, GATHER_XLA = "gather + cuDNN", "gather + XLA"
FA2, FA2_TENSOR_CORES = "FlashInfer fa2", "FlashInfer fa2, tensor cores"
FLASHINFER_CUDNN, XQA, TRT_LLM = "FlashInfer cuDNN", "FlashInfer XQA", "FlashInfer TRT-LLM"
TORCH_SDPA = "gather + torch SDPA"
XLA, PYTORCH = "XLA", "PyTorch"
JAX_LOOP, CUDA_GRAPH = "JAX loop", "CUDA graph"
XLA_ATTENTION = "XLA attention"

SIDES = (
    OURS,
    WITH_PLAN,
    JAX_TRITON,
    CUDNN_PAGED,
    GATHER_CUDNN,
    GATHER_XLA,
    FA2,
    FA2_TENSOR_CORES,
    FLASHINFER_CUDNN,
    XQA,
    TRT_LLM,
    TORCH_SDPA,
    XLA,
    PYTORCH,
    JAX_LOOP,
    CUDA_GRAPH,
    XLA_ATTENTION,
)
