"""Checkpoints in the Hugging Face layout: config.json, *.safetensors, and tokenizer.json where there is one.

Reads Llama 3.x, Qwen2/2.5, Qwen3 and Mistral as they are published, and writes a model as the one of these
families that has its options, so that other programs can open it. Whatever does not fit is a
`CheckpointError` that names the file, the tensor or the option; nothing is skipped, padded or guessed.

    decoder = checkpoint.load(folder)
    tokenizer = checkpoint.load_tokenizer(folder)
    checkpoint.save(folder, decoder, tokenizer)
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from models.decoder import Decoder, DecoderConfig, Llama3Scaling
from models.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved as it is; the message names what is wrong with it."""


# --- what callers use ---


def load(folder: str | os.PathLike[str], *, dtype: Any = None, param_dtype: Any = None) -> Decoder:
    """Reads a model.

    Args:
      folder: With config.json and model.safetensors, or model.safetensors.index.json and its shards.
      dtype: Of the computation. Default: what config.json says, or float32.
      param_dtype: Of the parameters; the file's are converted. Default: `dtype`.

    Raises:
      CheckpointError: a file is missing, truncated or unreadable; a tensor is missing, misshapen or unknown;
        the architecture or an option is not supported.
    """
    folder = pathlib.Path(folder)
    config = load_config(folder, dtype=dtype, param_dtype=param_dtype)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = [(*_stored(path), leaf.shape) for path, leaf in leaves]
    files = _tensor_files(folder)
    with _Reader(folder) as reader:
        _check_names(files, {name for name, _, _ in wanted}, config)
        for name, is_transposed, shape in wanted:
            reader.check(files[name], name, shape[::-1] if is_transposed else shape)
        values = []
        for name, is_transposed, _ in wanted:
            value = reader.read(files[name], name)
            values.append(jnp.asarray(value.T if is_transposed else value, config.param_dtype))
        if config.tie_embeddings and _UNEMBEDDING in files:
            _check_tied(reader, files)
    return jax.tree.unflatten(structure, values)


def save(folder: str | os.PathLike[str], decoder: Decoder, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model, bit for bit; `load` reads it back. Files of a model that is there are replaced.

    Args:
      folder: Made if it is not there.
      decoder: Its options must be those of a supported family.
      tokenizer: Written as tokenizer.json, unless its tokens are bytes; its stop tokens go into config.json.

    Raises:
      CheckpointError: no family has the model's options; says which do not go together.
    """
    folder = pathlib.Path(folder)
    values = _to_json(decoder.config)
    if tokenizer is not None and tokenizer.stop_tokens:
        values["eos_token_id"] = list(tokenizer.stop_tokens)
    leaves, _ = jax.tree_util.tree_flatten_with_path(decoder)
    tensors = {}
    for path, value in leaves:
        name, is_transposed = _stored(path)
        # safetensors writes memory as it lies: a transposed view would be written untransposed.
        tensors[name] = np.ascontiguousarray(np.asarray(value).T if is_transposed else np.asarray(value))
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, FileTokenizer):
        _replace(folder / _TOKENIZER, tokenizer.inner.to_str().encode())
    else:
        (folder / _TOKENIZER).unlink(missing_ok=True)
    _replace(folder / "config.json", json.dumps(values, indent=2).encode())
    (folder / _INDEX).unlink(missing_ok=True)
    _replace(folder / _WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The checkpoint's tokeniser; bytes if it has none.

    Raises:
      CheckpointError: tokenizer.json is unreadable or has more tokens than the model; or there is none and
        the model has no token for every byte, or comes with another kind of tokeniser.
    """
    folder = pathlib.Path(folder)
    vocab_size = load_config(folder).vocab_size
    stop_tokens = _stop_tokens(folder)
    if (folder / _TOKENIZER).exists():
        try:
            tokenizer = FileTokenizer(folder / _TOKENIZER, stop_tokens)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"{folder / _TOKENIZER} has token ids up to {tokenizer.vocab_size - 1}, expected them below the "
                f"model's vocab_size = {vocab_size}"
            )
        return tokenizer
    for name in ("tokenizer.model", "vocab.json", "tekken.json"):
        if (folder / name).exists():
            raise CheckpointError(f"{folder} has {name}, expected {_TOKENIZER}: convert it")
    if vocab_size < ByteTokenizer.vocab_size:
        raise CheckpointError(
            f"{folder} has no {_TOKENIZER} and vocab_size = {vocab_size}, expected at least "
            f"{ByteTokenizer.vocab_size} for a model of bytes"
        )
    return ByteTokenizer(stop_tokens)


def load_config(
    folder: str | os.PathLike[str], *, dtype: Any = None, param_dtype: Any = None
) -> DecoderConfig:
    """Reads config.json alone; arguments and errors as in `load`."""
    path = pathlib.Path(folder) / "config.json"
    config = _from_json(_Options(path, _read_json(path)), dtype)
    return dataclasses.replace(config, param_dtype=config.dtype if param_dtype is None else param_dtype)


# --- config.json ---


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` implies without saying so."""

    architecture: str
    use_qkv_bias: bool = False
    use_qk_norm: bool = False
    windows: str = "none"  # "none", "all" layers, or "some"
    head_dim: int | None = None  # where config.json is silent; None: hidden_size / num_attention_heads


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", windows="all"),
    "qwen2": _Family("Qwen2ForCausalLM", use_qkv_bias=True, windows="some"),
    "qwen3": _Family("Qwen3ForCausalLM", use_qk_norm=True, windows="some", head_dim=128),
}
# Options that the families' published code has and this model has not: the only values it can honour.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
}


class _Options:
    """A JSON object whose entries are asked for with their type; errors name the file and the entry."""

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The entry; `default` where it is missing or null, and an error without a default."""
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.path} has no {self.prefix}{name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise self.error(name, names)
        return value

    def error(self, name: str, expected: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} is {self.values.get(name)!r}, expected {expected}"
        )


def _from_json(options: _Options, dtype: Any) -> DecoderConfig:
    model_type = options.get("model_type", str)
    family = _FAMILIES.get(model_type)
    if family is None:
        raise options.error("model_type", f"one of {', '.join(_FAMILIES)}")
    if options.get("architectures", list, [family.architecture]) != [family.architecture]:
        raise options.error("architectures", [family.architecture])
    for name, only in _FIXED.items():
        if options.get(name, object, only) != only:
            raise options.error(name, f"{only!r}, the only value that is implemented")
    if dtype is None:
        name = "torch_dtype" if "torch_dtype" in options.values else "dtype"
        dtype = options.get(name, str, "float32")
        if dtype not in ("float32", "bfloat16"):
            raise options.error(name, "float32 or bfloat16; or choose one: load(folder, dtype=...)")
    hidden_size, num_heads = options.get("hidden_size", int), options.get("num_attention_heads", int)
    if hidden_size % max(num_heads, 1) and options.get("head_dim", int, family.head_dim) is None:
        raise options.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}, or head_dim")
    rope_theta, rope_scaling = _rope(options)
    try:
        return DecoderConfig(
            vocab_size=options.get("vocab_size", int),
            hidden_size=hidden_size,
            mlp_size=options.get("intermediate_size", int),
            num_layers=options.get("num_hidden_layers", int),
            num_q_heads=num_heads,
            num_kv_heads=options.get("num_key_value_heads", int),
            head_dim=options.get("head_dim", int, family.head_dim or hidden_size // max(num_heads, 1)),
            max_seq_len=options.get("max_position_embeddings", int),
            windows=_windows(options, family),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=options.get("rms_norm_eps", (float, int)),
            use_qkv_bias=family.use_qkv_bias,
            use_qk_norm=family.use_qk_norm,
            tie_embeddings=options.get("tie_word_embeddings", bool, False),
            dtype=dtype,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{options.path}: {error}") from error


def _rope(options: _Options) -> tuple[float, Llama3Scaling | None]:
    """`rope_theta` and `rope_scaling`, or both in `rope_parameters` (transformers 5)."""
    name = "rope_parameters" if options.values.get("rope_parameters") else "rope_scaling"
    rope = _Options(options.path, options.get(name, dict, {}), f"{name}.")
    theta = float(rope.get("rope_theta", (float, int), options.get("rope_theta", (float, int), 10_000.0)))
    type_name = "type" if "type" in rope.values and "rope_type" not in rope.values else "rope_type"
    rope_type = rope.get(type_name, str, "default")
    factor_is_left_out = rope.get("partial_rotary_factor", (float, int), 1.0) == 1.0
    if not factor_is_left_out:
        raise rope.error("partial_rotary_factor", "1.0, the only value that is implemented")
    if rope_type == "default" and not any(isinstance(value, dict) for value in rope.values.values()):
        return theta, None
    if rope_type != "llama3":
        raise rope.error(type_name, "default or llama3, the same for all layers")
    return theta, Llama3Scaling(
        factor=rope.get("factor", (float, int)),
        low_freq_factor=rope.get("low_freq_factor", (float, int)),
        high_freq_factor=rope.get("high_freq_factor", (float, int)),
        original_max_seq_len=rope.get("original_max_position_embeddings", int),
    )
