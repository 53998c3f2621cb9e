# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
"""Question: what does vLLM's v1 KV cache manager (plain Python, on the host) cost for the same bookkeeping?

Command: python -m experiments.bookkeeping --peers [--peers-python PYTHON_WITH_VLLM]
   alone: python -m experiments.peers.vllm_manager '{"num_blocks": 65536, ...}'
Machine: 2 cores of an AMD EPYC; vLLM 0.33.0, Python 3.11
Answer:  894 us for a decode step of 256 rows with prefix caching off, 978 with it on (1,132 with the
  hashing of the new tokens). A prompt of 8,192 tokens: 35 us with caching off; with it on 512 us uncached and
  408 cached, and 1,308 to hash it when the request arrives.
"""

import gc
import json
import sys
import time

from experiments.common.timing import summary

try:
    import torch
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    MISSING = None
except Exception as error:  # an engine has many ways not to import; each is the answer to "why skipped"
    MISSING = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def record(operation: str, calls: str, enable_caching: bool, seconds: list[float]) -> dict:
    variant = f"prefix caching {'on' if enable_caching else 'off'}"
    return {"operation": operation, "variant": variant, "calls": calls, "figure": "call", **summary(seconds)}


def new_manager(sizes: dict, enable_caching: bool) -> "KVCacheManager":
    block_size = sizes["block_size"]
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=sizes["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=sizes["max_seq_len"],
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=enable_caching,
    )


def new_request(sizes: dict, name: str, num_tokens: int, seed: int, enable_caching: bool) -> "Request":
    """A request of its own tokens; with caching its blocks are hashed here, as on arrival in the engine."""
    return Request(
        request_id=name,
        prompt_token_ids=[(seed * 1_000_003 + position * 7919) % 50_000 for position in range(num_tokens)],
        sampling_params=SamplingParams(max_tokens=sizes["max_seq_len"]),
        pooling_params=None,
        block_hasher=get_request_block_hasher(sizes["block_size"], sha256) if enable_caching else None,
    )


def admit(manager: "KVCacheManager", request: "Request") -> int:
    """The scheduler's two calls for a new prompt; returns the tokens found in the cache."""
    blocks, num_cached, _ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request,
        request.num_tokens - num_cached,
        num_new_computed_tokens=num_cached,
        new_computed_blocks=blocks,
    )
    assert allocated is not None, "vLLM: out of blocks"
    return num_cached


def time_decode_steps(
    sizes: dict, enable_caching: bool, num_steps: int = 200
) -> tuple[list[float], list[float]]:
    """Seconds per decode step of all rows: the manager alone, and with recording (hashing) the new tokens."""
    manager = new_manager(sizes, enable_caching)
    requests = []
    for row, num_tokens in enumerate(sizes["context_lens"]):
        request = new_request(sizes, str(row), num_tokens, row, enable_caching)
        admit(manager, request)
        request.num_computed_tokens = num_tokens
        request.append_output_token_ids(row)
        requests.append(request)
    gc.collect()
    gc.freeze()  # as vLLM's engine does after its start
    alone, with_tokens = [], []
    for step in range(num_steps):
        start = time.perf_counter()
        manager.new_step_starts()
        for request in requests:
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("vLLM: out of blocks")
            request.num_computed_tokens += 1
        end = time.perf_counter()
        for request in requests:
            request.append_output_token_ids(step % 1000)
        alone.append(end - start)
        with_tokens.append(time.perf_counter() - start)
    held = sum(len(manager.get_block_ids(request.request_id)[0]) for request in requests)
    expected = sum(-(-request.num_computed_tokens // sizes["block_size"]) for request in requests)
    assert held == expected, f"vLLM holds {held} blocks for tokens of {expected}"
    gc.unfreeze()
    return alone, with_tokens


def time_prompts(sizes: dict, enable_caching: bool, num_calls: int = 60) -> dict[str, list[float]]:
    """Seconds to hash, admit and free one prompt: new content each time, then the same content again."""
    manager = new_manager(sizes, enable_caching)
    prompt_len = sizes["prompt_len"]
    seconds: dict[str, list[float]] = {"hash": [], "uncached": [], "cached": []}
    for call in range(num_calls):
        for kind in ("uncached", "cached"):
            start = time.perf_counter()
            request = new_request(sizes, f"{call} {kind}", prompt_len, call, enable_caching)
            hashed = time.perf_counter()
            num_cached = admit(manager, request)
            end = time.perf_counter()
            manager.free(request)
            hit = enable_caching and kind == "cached"
            assert num_cached == (prompt_len - sizes["block_size"] if hit else 0), (
                f"vLLM: {num_cached} cached"
            )
            seconds["hash"].append(hashed - start)
            seconds[kind].append(end - hashed)
    return seconds


def main() -> dict:
    sizes = json.loads(sys.argv[1])
    if MISSING:
        return {"peer": "vllm", "skipped": MISSING}
    init_none_hash(sha256)
    records = []
    for caching in (False, True):
        alone, with_tokens = time_decode_steps(sizes, caching)
        calls = "new_step_starts; for each row allocate_slots(request, 1)"
        records.append(record("extend", calls, caching, alone))
        calls += ", append_output_token_ids"
        records.append(record("extend and append the tokens", calls, caching, with_tokens))
        seconds = time_prompts(sizes, caching)
        calls = "get_computed_blocks, allocate_slots"
        records.append(record("allocate, uncached", calls, caching, seconds["uncached"]))
        if caching:
            records.append(record("allocate, cached", calls, caching, seconds["cached"]))
            records.append(record("hash the prompt", "Request", caching, seconds["hash"]))
    return {"peer": "vllm", "version": vllm.__version__, "python": sys.version.split()[0], "records": records}


if __name__ == "__main__":
    print(json.dumps(main()))
