"""How large a checkpoint's weights are, from its index, the head of its file, or its config."""

import math
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from models.config import DecoderConfig
from models.decoder import Decoder
from models.json_object import CheckpointError, JsonObject

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD_BYTES = 8  # at the file's beginning: how long the JSON object is that lists the tensors


def weight_bytes(folder: Path, config: DecoderConfig, dtype: str | None) -> dict[str, Any]:
    """Counts the bytes of a checkpoint's tensors.

    Args:
      folder: Holds config.json, and the weights or their index where they are to be asked.
      config: The model's.
      dtype: To which the weights will be converted, so that no file says how large they are; else None.

    Returns:
      `bytes`, and in `source` what said so.

    Raises:
      CheckpointError: the file or the index is broken.
    """
    if dtype is None and (folder / _FILE).is_file():
        return {"bytes": _tensor_bytes(folder / _FILE), "source": _FILE}
    if dtype is None and (folder / _INDEX).is_file():
        metadata = JsonObject(folder / _INDEX).part("metadata")
        if metadata.values.get("total_size") is not None:
            return {"bytes": metadata.get("total_size", int), "source": _INDEX}
    return {"bytes": parameter_bytes(config), "source": "config.json"}


def parameter_bytes(config: DecoderConfig) -> int:
    """Counts the bytes of the parameters that `checkpoint.load` makes."""
    decoder = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(decoder))


def _tensor_bytes(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        listed = int.from_bytes(file.read(_HEAD_BYTES), "little")
    if not 0 < listed <= size - _HEAD_BYTES:
        raise CheckpointError(f"{path} ({size} bytes) is not a whole safetensors file")
    return size - _HEAD_BYTES - listed
