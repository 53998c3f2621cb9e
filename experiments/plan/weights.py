"""How large a checkpoint's weights are, from its index, the heads of its files, or its config."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from models.config import DecoderConfig
from models.config_json import family_of
from models.decoder import Decoder
from models.json_object import CheckpointError, JsonObject
from models.tensor_names import find_stored

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD_BYTES = 8  # at the file's beginning: how long the JSON object is that lists the tensors


def weight_bytes(values: JsonObject, config: DecoderConfig, dtype: str | None) -> dict[str, Any]:
    """Counts the bytes of a checkpoint's tensors, but for those that `checkpoint.load` leaves out.

    Args:
      values: The entries of config.json, beside which are the weights or their index if they are to be asked.
      config: The model's.
      dtype: To which the weights will be converted, so that no file says how large they are; else None.

    Returns:
      `bytes`, and in `source` what said so.

    Raises:
      CheckpointError: a file or the index is broken.
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
