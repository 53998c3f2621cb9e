"""Question: how many tokens, rows and hits does a device's memory hold beside a model's weights?

Command: python -m experiments.plan CONFIG.json --memory 80GiB [--trace FILE] [--dtype D] [--format F]
         [--lengths N ...] [--query-len N] [--block-size N] [--json]
Answer:  Llama 3 8B in bfloat16 takes 131,072 bytes a token: beside its 15.0 GiB of weights 80 GiB hold
  532,000 tokens, 130 rows of 4,096. DeepSeek-V3's latents take 70,272. Of Mooncake's conversations such a
  cache of Llama finds 4.6% of the tokens, an endless one 37.4%; the knee is at 35.7%, 2.3 TiB.

CONFIG is a config.json, or its folder; of the model nothing is loaded. A token's bytes are those of the pools
that `kv.init` makes, by layer group. The weights are as large as the safetensors files beside CONFIG or their
index say, without what `checkpoint.load` leaves out; else as what it would make. A `quantization_config`,
which it refuses, is left aside: it changes no cache. Into the room fit the cache and what a step needs.

With `--trace`, requests in the format of `experiments.traces.trace`: the hit rate of an LRU of every size,
from one pass. The knee is where the curve is farthest above the straight line between its ends (Kneedle:
Satopää et al., 2011). A cached token counts as what the layers that keep all tokens store of it.
"""

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import kvcache_jax as kv
from experiments.common import command
from experiments.common.report import add_options, deliver, framed
from experiments.common.timing import show_records
from experiments.traces.stack_distances import hit_rates
from experiments.traces.trace import Trace, add_trace_options, read_trace
from kvcache_jax.core.config import format_bytes
from kvcache_jax.core.describe import control_bytes
from models.config import DecoderConfig
from models.config_json import family_of, read_values
from models.decoder import Decoder, cache_config
from models.json_object import CheckpointError, JsonObject
from models.tensor_names import find_stored

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD_BYTES = 8  # at the file's beginning: how long the JSON object is that lists the tensors
LENGTHS = 1024, 4096, 16384, 65536


def weight_bytes(values: JsonObject, config: DecoderConfig, dtype: str | None) -> dict[str, Any]:
    """Counts the `bytes` of a checkpoint's tensors, but for those that `checkpoint.load` leaves out.

    The weights or their index are beside config.json; `source` is what said so. Where they will be converted
    to another dtype no file says how large they are.
    """
    folder, quantised = values.path.parent, values.part("quantization_config")
    source = f"config.json, in {config.param_dtype.name}"
    if quantised.values:
        source += f" and not in {quantised.get('quant_method', str, 'few bits')}"
    reckoned = {"bytes": parameter_bytes(config), "source": source}
    if dtype is not None:
        return reckoned
    if (folder / _FILE).is_file():
        return {"bytes": _stored_bytes([folder / _FILE], values, config), "source": _FILE}
    if not (folder / _INDEX).is_file():
        return reckoned
    index = JsonObject(folder / _INDEX)
    shard_of = index.get("weight_map", dict, {})
    shards = {folder / str(shard) for shard in shard_of.values()}
    if shards and all(shard.is_file() for shard in shards):
        return {"bytes": _stored_bytes(shards, values, config), "source": _INDEX}
    total = index.part("metadata").get("total_size", int, None)
    num_left_out = len(family_of(values).left_out(shard_of, values))
    if total is None or (num_left_out and not quantised.values):
        return reckoned  # the index alone says no tensor's size
    beside = f", with {num_left_out} tensors that are left out" if num_left_out else ""
    return {"bytes": total, "source": _INDEX + beside}


def parameter_bytes(config: DecoderConfig) -> int:
    """Counts the bytes of the parameters that `checkpoint.load` makes."""
    decoder = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(decoder))


def _stored_bytes(paths: Iterable[Path], values: JsonObject, config: DecoderConfig) -> int:
    sizes = {name: size for path in paths for name, size in _tensor_sizes(path).items()}
    family = family_of(values)
    left_out = {*family.left_out(sizes, values)}
    names = family.tensor_names(config)
    embedding, unembedding = (find_stored(names, name).names[0] for name in ("embedding", "unembedding"))
    if config.tie_embeddings and embedding in sizes:
        left_out.add(unembedding)  # some programs write a tied matrix twice
    return sum(size for name, size in sizes.items() if name not in left_out)


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Reads the bytes of each tensor in the head of its file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        listed = int.from_bytes(file.read(_HEAD_BYTES), "little")
        head = file.read(min(listed, size))
    try:
        listing = {name: each for name, each in json.loads(head).items() if name != "__metadata__"}
        spans = {name: each["data_offsets"] for name, each in listing.items()}
        found = {name: int(end) - int(start) for name, (start, end) in spans.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        found = {}
    if not found or _HEAD_BYTES + listed + sum(found.values()) != size:
        raise CheckpointError(f"{path} ({size} bytes) is not a whole safetensors file")
    return found


_GROUPS = {
    "layers": "{num_layers} x {kind}",
    "bytes a token": lambda group: f"{group['token_bytes']:,.6g}" if group["keeps_all"] else "–",
    "a row at most": lambda group: format_bytes(group["row_bytes"]),
}
_LENGTHS = {
    "tokens of a row": "{length:,}",
    "bytes of a row": lambda record: format_bytes(record["row_bytes"]),
    "rows that fit": "{num_rows:,}",
}
_SPOTS = {
    "LRU": "{name}",
    "size": lambda spot: format_bytes(spot["bytes"]),
    "trace blocks": "{num_blocks:,}",
    "hits of tokens": lambda spot: f"{spot['hit_rate_tokens']:.4f}",
    "of blocks": lambda spot: f"{spot['hit_rate_blocks']:.4f}",
}


@framed
def show(report: dict[str, Any]) -> None:
    weights = report["weights"]
    print(
        f"{report['config']} in {report['dtype']}: {format_bytes(report['memory'])} of memory, "
        f"weights {format_bytes(weights['bytes'])} (from {weights['source']}), "
        f"room for the cache, and for what a step takes, {format_bytes(report['room'])}"
    )
    show_records(f"{report['token_bytes']:,} bytes a token", _GROUPS, report["groups"])
    show_records("rows", _LENGTHS, report["lengths"])
    if "trace" in report:
        trace = report["trace"]
        spots = [{"name": name, **spot} for name, spot in trace["spots"].items()]
        show_records(f"hits of {trace['name']}", _SPOTS, spots)


_UNITS = {unit: 1024**i for i, unit in enumerate(("", "KiB", "MiB", "GiB", "TiB"))}
_UNITS |= {unit: 1000**i for i, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}


def memory(text: str) -> int:
    """An argparse `type`: bytes, such as 80GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a size such as 80GiB or 24e9")
    return size


def groups(config: kv.CacheConfig) -> list[dict[str, Any]]:
    """What a row of the config's longest length takes, by layer group."""
    return [
        {
            "kind": group.kind.label,
            "num_layers": group.num_layers,
            "token_bytes": group.block_bytes / group.block_size,
            "keeps_all": group.span.keeps_all,
            "row_bytes": group.max_held_blocks * group.block_bytes,
        }
        for group in config.groups
        if group.arrays
    ]


def rows_that_fit(make: Callable[..., kv.CacheConfig], length: int, room: int) -> dict[str, int]:
    """Counts the rows of a length whose pools and control state take at most `room` bytes."""

    def need(num_rows: int) -> int:
        config = make(max_seqs=num_rows, max_seq_len=length)
        return kv.memory_bytes(config) + control_bytes(config)

    row_bytes, num_rows = kv.memory_bytes(make(max_seqs=1, max_seq_len=length)), 0
    if need(1) <= room:
        num_rows = room // row_bytes
        while num_rows > 1 and (more := need(num_rows) - room) > 0:
            num_rows -= -(-more // row_bytes)
    return {"length": length, "row_bytes": row_bytes, "num_rows": num_rows}


def hits(trace: Trace, token_bytes: int, room: int) -> dict[str, Any]:
    """The hit rates of caches of all sizes, at `room` bytes and at the knee."""
    by_block, by_token = hit_rates(trace)
    block_bytes = token_bytes * trace.tokens_per_id
    knee = int(np.argmax(by_token / max(by_token[-1], 1e-9) - np.linspace(0, 1, len(by_token))))

    def at(num_blocks: int) -> dict[str, Any]:
        i = min(num_blocks, len(by_token) - 1)
        rates = dict(hit_rate_blocks=float(by_block[i]), hit_rate_tokens=float(by_token[i]))
        return {"num_blocks": i, "bytes": i * block_bytes, **rates}

    spots = {"memory": at(room // block_bytes), "knee": at(knee), "endless": at(len(by_token))}
    return {"block_bytes": block_bytes, "spots": spots, "hit_rate_tokens": by_token.tolist()}


def plan(model: DecoderConfig, weights: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    quantise = options.format and functools.partial(kv.Quantised, format=options.format)

    def make(max_seqs: int, max_seq_len: int) -> kv.CacheConfig:
        sizes = dict(max_seqs=max_seqs, max_seq_len=max_seq_len, block_size=options.block_size)
        max_query_len = min(options.query_len, max_seq_len)
        return cache_config(model, quantise=quantise, max_query_len=max_query_len, **sizes)

    lengths = options.lengths or [n for n in LENGTHS if n < model.max_seq_len] + [model.max_seq_len]
    found = groups(make(1, max(lengths)))
    room = options.memory - weights["bytes"]
    if room <= 0:
        raise command.InputError(
            f"got --memory of {options.memory:,} bytes, expected more than {weights['bytes']:,}, which the "
            "weights take: take a larger device, or several"
        )
    return {
        "memory": options.memory,
        "weights": weights,
        "dtype": model.dtype.name,
        "room": room,
        "groups": found,
        "token_bytes": round(sum(group["token_bytes"] for group in found if group["keeps_all"])),
        "lengths": [rows_that_fit(make, length, room) for length in sorted({*lengths})],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.plan", __doc__)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="config.json of a checkpoint, or its folder"
    )
    parser.add_argument("--memory", type=memory, required=True, metavar="SIZE", help="of the device: 80GiB")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: what CONFIG says")
    parser.add_argument("--format", choices=("int8", "int4", "fp8"), help="of quantised keys and values")
    parser.add_argument(
        "--lengths", type=command.integer(1), nargs="+", metavar="N", help="of rows, in tokens"
    )
    parser.count("--query-len", 512)
    parser.count("--block-size", 16)
    add_trace_options(parser, is_required=False)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    path = options.config / "config.json" if options.config.is_dir() else options.config
    with parser.refusing(ValueError):
        values = JsonObject(path)
        plain = {name: value for name, value in values.values.items() if name != "quantization_config"}
        model = read_values(JsonObject(path, plain), options.dtype)
        found = plan(model, weight_bytes(values, model, options.dtype), options)
        trace = options.trace and read_trace(options.trace, options.tokens_per_id)
    if trace:
        if not found["token_bytes"]:
            parser.error(f"got --trace with {path}, of which no layer keeps all tokens: leave --trace out")
        found["trace"] = {"name": options.trace.name, **hits(trace, found["token_bytes"], found["room"])}
    return deliver({"config": str(path)} | found, options, show)


if __name__ == "__main__":
    command.run(main)
