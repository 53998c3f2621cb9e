"""The planner: bytes as `init` makes them, rows that fit and no more, hits of an LRU of each size."""

import argparse
import json

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from experiments import plan as planner
from experiments.plan import parameter_bytes, weight_bytes
from experiments.traces.stack_distances import hit_rates
from experiments.traces.trace import read_trace
from kvcache_jax.core.describe import control_bytes
from models import checkpoint
from models.decoder import cache_config
from models.json_object import JsonObject
from tests.experiments.trace_maker import LONGEST, TOKENS_PER_ID, lru_hits, make_requests, write
from tests.models.checkpoint_files import (
    FAMILIES,
    FIXTURES,
    edit_json,
    edit_tensors,
    read_json,
    read_tensors,
)

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize(
    ("values", "token_bytes", "num_parameters", "instead"),
    [
        (LLAMA_3_8B, 131_072, 8_030_261_248, ""),
        (DEEPSEEK_V3, 70_272, 671_026_419_200, " and not in fp8"),
        # Twelve of its layers keep all tokens.
        (GPT_OSS_20B, 12 * 2 * 8 * 64 * 2, 20_914_757_184, " and not in mxfp4"),
    ],
    ids=["Llama 3 8B", "DeepSeek-V3", "gpt-oss-20b"],
)
def test_published_figures(tmp_path, report_of, values, token_bytes, num_parameters, instead):
    (tmp_path / "config.json").write_text(json.dumps(values))
    report = report_of(planner, tmp_path, "--memory", "2TB")
    assert report["token_bytes"] == token_bytes
    # Of them the corrections of routers are float32.
    num_corrections = 58 * 256 if "n_group" in values else 0
    assert report["weights"] == {
        "bytes": 2 * (num_parameters + num_corrections),
        "source": f"config.json, in bfloat16{instead}",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_pools_and_rows_fit(family):
    model = checkpoint.load_config(FIXTURES / family)

    def make(max_seqs, max_seq_len):
        return cache_config(model, max_seqs=max_seqs, max_seq_len=max_seq_len, max_query_len=16)

    for length, room in ((40, 100_000), (250, 1_000_000), (250, 100)):
        found = planner.rows_that_fit(make, length, room)
        fits = []
        for num_rows in (found["num_rows"], found["num_rows"] + 1):
            config = make(max(num_rows, 1), length)
            pools = jax.eval_shape(lambda config=config: kv.init(config)).pools
            num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
            assert num_bytes == max(num_rows, 1) * found["row_bytes"]
            fits.append(num_rows == 0 or num_bytes + control_bytes(config) <= room)
        assert fits == [True, False]
    config = make(1, 250)
    assert sum(group["row_bytes"] for group in planner.groups(config)) == kv.memory_bytes(config)


def weights(folder, dtype=None):
    values = JsonObject(folder / "config.json")
    return weight_bytes(values, checkpoint.load_config(folder, dtype=dtype), dtype)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "phi3", "qwen3_moe", "gemma3", "gpt_oss", "gemma3_whole"]
)
def test_weights_are_as_large_as_the_files_say(family):
    """But for what is left out, as the part of the last that sees."""
    folder = FIXTURES / family
    source = "model.safetensors.index.json" if family == "qwen3" else "model.safetensors"
    num_bytes = parameter_bytes(checkpoint.load_config(folder))
    assert weights(folder) == {"bytes": num_bytes, "source": source}
    wide = parameter_bytes(checkpoint.load_config(folder, dtype="float32"))
    assert weights(folder, "float32") == {"bytes": wide, "source": "config.json, in float32"}


def test_weights_that_load_leaves_out_are_not_counted(copy_checkpoint):
    """Extra layers, stored frequencies, a tied matrix that is there twice; an index alone names them."""
    folder = copy_checkpoint("deepseek_v3")
    num_bytes = weights(folder)["bytes"]
    edit_json(folder, num_nextn_predict_layers=1)
    extra = ["model.layers.3.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    edit_tensors(folder, {name: np.ones(4, np.float32) for name in extra})
    assert weights(folder) == {"bytes": num_bytes, "source": "model.safetensors"}
    names = {name: "model-00001-of-00001.safetensors" for name in read_tensors(folder)}
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 77}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights(folder) == {"bytes": num_bytes, "source": "config.json, in bfloat16"}
    values, config = read_json(folder) | {"quantization_config": {}}, checkpoint.load_config(folder)
    for quantised, wanted in (({"bits": 4}, 77), ({}, num_bytes)):
        values["quantization_config"] = quantised
        found = weight_bytes(JsonObject(folder / "config.json", values), config, None)
        assert found["bytes"] == wanted
        assert found["source"].endswith(", with 2 tensors that are left out") == bool(quantised)

    folder = copy_checkpoint("qwen2")
    num_bytes = weights(folder)["bytes"]
    edit_tensors(folder, {"lm_head.weight": read_tensors(folder)["model.embed_tokens.weight"]})
    assert weights(folder)["bytes"] == num_bytes


def test_hits_of_all_sizes_are_those_of_a_dict(tmp_path):
    requests = make_requests()
    trace = read_trace(write(tmp_path, requests), TOKENS_PER_ID)
    by_block, by_token = hit_rates(trace)
    assert len(by_block) == trace.num_distinct + 1 and by_block[0] == 0 == by_token[0]
    for num_blocks in (*range(LONGEST, trace.num_distinct, 7), trace.num_distinct):
        num_hits = np.array(lru_hits(requests, num_blocks)[0])
        assert by_block[num_blocks] == pytest.approx(num_hits.sum() / trace.num_ids.sum())
        num_tokens = trace.num_hit_tokens(num_hits).sum()
        assert by_token[num_blocks] == pytest.approx(num_tokens / trace.num_tokens.sum())


def test_a_plan_with_a_trace(tmp_path, capsys, report_of):
    trace = write(tmp_path, make_requests())
    arguments = FIXTURES / "gpt_oss", "--memory", "4MiB", "--lengths", 8, 300, "--trace", trace
    report = report_of(planner, *arguments)
    full, windows = report["groups"][1], report["groups"][0]
    assert (full["token_bytes"], full["keeps_all"]) == (256.0, True) and not windows["keeps_all"]
    spots = report["trace"]["spots"]
    held = min(report["room"] // (256 * TOKENS_PER_ID), spots["endless"]["num_blocks"])
    assert spots["memory"]["num_blocks"] == held < spots["knee"]["num_blocks"]
    rates = np.array(report["trace"]["hit_rate_tokens"])
    above = rates / rates[-1] - np.arange(len(rates)) / (len(rates) - 1)
    assert above[spots["knee"]["num_blocks"]] == above.max()
    assert planner.main([str(argument) for argument in arguments]) == 0
    text = capsys.readouterr().out
    assert "config.json in bfloat16: 4" in text and "for what a step takes" in text
    assert "256 bytes a token" in text and "2 x FullAttention" in text and "hits of trace.jsonl" in text
    small = report_of(planner, FIXTURES / "llama", "--memory", "4MiB", "--format", "int8")
    assert small["token_bytes"] < 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1.5KiB", 1536), ("7", 7)]
)
def test_sizes(text, num_bytes):
    assert planner.memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "GiB", "3 pages", "-1GiB", "0.1B"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as 80GiB"):
        planner.memory(text)


def test_bad_input_is_one_sentence(tmp_path, refusal):
    trace, llama = write(tmp_path, make_requests()), FIXTURES / "llama"
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"short")
    for config, memory, more, said in [
        ("/nowhere/config.json", "1GiB", (), "nowhere is not there"),
        (llama, "1KiB", (), "expected more than"),
        (llama, "much", (), "expected a size such as"),
        (FIXTURES / "mistral", "1GiB", ("--trace", trace), "no layer keeps all tokens: leave --trace out"),
        (llama, "1GiB", ("--trace", "/nowhere"), "cannot be read"),
        (tmp_path, "1GiB", (), "model.safetensors (5 bytes) is not a whole safetensors file"),
    ]:
        assert said in refusal(planner, config, "--memory", memory, *more)
