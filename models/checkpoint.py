"""Checkpoints in the Hugging Face layout: config.json, *.safetensors, and tokenizer.json where there is one.

Reads the models of `models.families`: Llama 3.x, Mistral, Mixtral, Ministral (2024), Qwen 2, Qwen 3 and their
mixtures, Gemma 2 and 3, DeepSeek-V2, DeepSeek-V3 in bfloat16, GLM-4 and GLM-4.7-Flash, gpt-oss in bfloat16,
Phi-3 (4k) and 4 (14B), OLMo 2 and 3, SmolLM 3, Granite 3, Seed-OSS, and the hybrids Qwen 3.5 (text),
Qwen3-Next, Kimi-Linear, Granite 4, Nemotron-H and LFM2. Writes a model as the first of these families that
has its options, so that other programs can open it too.

What does not fit is a `CheckpointError` that names the file, the tensor or the option; nothing is padded or
guessed. Tensors that see or that predict further tokens are left out, and a line of the log says so.

    decoder = checkpoint.load(folder)
    tokenizer = checkpoint.load_tokenizer(folder)
    checkpoint.save(folder, decoder, tokenizer)
"""

import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import Sharding

from kvcache_jax.arrays.sharding import put
from models.config import DecoderConfig
from models.config_json import find_family, read_config, read_dtype, write_config
from models.decoder import Decoder, is_on_gpu, stacked, unstacked
from models.json_object import CheckpointError, JsonObject
from models.tensor_names import Names, find_stored
from models.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = ["CheckpointError", "load", "load_config", "load_tokenizer", "save", "stored_dtype"]

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_TOKENIZER, _OTHER_TOKENIZERS = "tokenizer.json", ("tokenizer.model", "tekken.json", "vocab.json")
_FLOATS = ("F32", "BF16", "F16")
_LOGGER = logging.getLogger(__name__)


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    param_dtype: Any = None,
    is_stacked: bool | None = None,
    sharding: Sharding | Callable[[str, tuple[int, ...]], Sharding] | None = None,
) -> Decoder:
    """Reads a model.

    Args:
      folder: Has config.json and model.safetensors, or model.safetensors.index.json and its shards.
      dtype: Of the computation. Default: what config.json says, else float32.
      param_dtype: Of the parameters, which are converted to it, but for the corrections of routers and the
        decays of recurrences, which are float32. Default: `dtype`.
      is_stacked: Whether the layers are stacked, see `Decoder`. Default: as decoding wants them on the device
        that they are read to, on GPUs each by itself.
      sharding: Of all parameters, or a function of a parameter's path and shape that gives each its own, such
        as over a mesh of several processes. Each process reads the files. Default: one device.

    Raises:
      CheckpointError: a file is missing, truncated or no such file; a tensor is missing, misshapen or
        unknown; the architecture or an option is not implemented.
      ValueError: `dtype` or `param_dtype` is neither float32 nor bfloat16.
    """
    folder = pathlib.Path(folder)
    config = load_config(folder, dtype=dtype, param_dtype=param_dtype)
    if is_stacked is None:
        is_stacked = not is_on_gpu(jnp.zeros(()))
    layout = stacked if is_stacked else unstacked
    abstract = jax.eval_shape(lambda: layout(Decoder(config, rngs=nnx.Rngs(0))))
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    family = find_family(folder / _CONFIG)
    names = family.tensor_names(config)
    wanted = [(_source(abstract, names, path, leaf.shape), leaf) for path, leaf in leaves]
    shapes = _file_shapes([source for source, _ in wanted])
    embedding, unembedding = (find_stored(names, name).names[0] for name in ("embedding", "unembedding"))
    with contextlib.ExitStack() as stack:
        stored = _open(folder, stack)
        if config.tie_embeddings and embedding not in stored and unembedding in stored:
            stored[embedding] = stored.pop(unembedding)  # some programs write only the other
        left_out = family.left_out(stored.keys() - shapes.keys(), JsonObject(folder / _CONFIG))
        # Some programs write a tied matrix twice.
        _check_names(folder, stored, shapes, {unembedding} if config.tie_embeddings else set(), left_out)
        for name, shape in shapes.items():
            stored[name].check(shape)
        if config.tie_embeddings and unembedding in stored:
            _check_same(folder, stored[embedding], stored[unembedding])
        values = []
        for (source, leaf), (path, _) in zip(wanted, leaves, strict=True):
            value = np.empty(leaf.shape, leaf.dtype)
            for place, name in source.tensors.items():
                value[place] = source.from_file(stored[name].read())
            home = sharding(jax.tree_util.keystr(path), leaf.shape) if callable(sharding) else sharding
            values.append(jnp.asarray(value) if home is None else put(value, home))
    return jax.tree.unflatten(structure, values)


def save(folder: str | os.PathLike[str], decoder: Decoder, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model bit for bit, so that `load` gives it back; replaces the one that is there.

    In what dtype it computes is not part of it: `load` computes in the parameters', or in its own `dtype`.

    Args:
      folder: Made where it is missing.
      decoder: Its options must be those of a supported family.
      tokenizer: Becomes tokenizer.json, unless tokens are bytes; its stop tokens go into config.json.

    Raises:
      CheckpointError: no family has the model's options, or the weights cannot be written.
    """
    folder = pathlib.Path(folder)
    values, family = write_config(decoder.config)
    if tokenizer is not None and tokenizer.stop_tokens:
        values["eos_token_id"] = list(tokenizer.stop_tokens)
    names = family.tensor_names(decoder.config)
    leaves = [(path, np.asarray(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(decoder)[0]]
    sources = [(_source(decoder, names, path, leaf.shape), leaf) for path, leaf in leaves]
    shapes, tensors = _file_shapes([source for source, _ in sources]), {}
    for source, leaf in sources:
        for place, name in source.tensors.items():
            tensor = tensors.setdefault(name, np.empty(shapes[name], leaf.dtype))
            source.into_file(leaf[place], tensor)
    folder.mkdir(parents=True, exist_ok=True)
    has_file = isinstance(tokenizer, FileTokenizer)
    names = (_WEIGHTS, _TOKENIZER, _CONFIG) if has_file else (_WEIGHTS, _CONFIG)
    files = {name: folder / f"{name}.part" for name in names}
    try:
        # Other programs refuse weights whose metadata does not say "pt".
        safetensors.numpy.save_file(tensors, files[_WEIGHTS], metadata={"format": "pt"})
        if has_file:
            tokenizer.inner.save(str(files[_TOKENIZER]))
        files[_CONFIG].write_text(json.dumps(values, indent=2) + "\n")
    except BaseException as error:
        for part in files.values():
            part.unlink(missing_ok=True)
        if isinstance(error, safetensors.SafetensorError):
            raise CheckpointError(f"{folder / _WEIGHTS} cannot be written: {error}") from error
        raise
    # From here on there is no config.json, and nothing to load, until all files are the new ones.
    for name in (_CONFIG, _INDEX, _TOKENIZER, _GENERATION):
        (folder / name).unlink(missing_ok=True)
    for name, part in files.items():
        part.replace(folder / name)


def load_config(
    folder: str | os.PathLike[str], *, dtype: Any = None, param_dtype: Any = None
) -> DecoderConfig:
    """Reads config.json alone; arguments and errors are `load`'s."""
    return read_config(pathlib.Path(folder) / _CONFIG, dtype, param_dtype)


def stored_dtype(folder: str | os.PathLike[str]) -> str:
    """Reads the name of the dtype in config.json, also of one that `load` must be given another for.

    Raises:
      CheckpointError: config.json is broken.
    """
    return read_dtype(pathlib.Path(folder) / _CONFIG)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Reads the checkpoint's tokeniser; bytes if it has none.

    Raises:
      CheckpointError: tokenizer.json is broken or has more tokens than the model; or there is none, and the
        model has fewer tokens than there are bytes or comes with a tokeniser of another format.
    """
    folder = pathlib.Path(folder)
    # Any dtype will do, where the file names one that no model computes in.
    vocab_size, stop_tokens = load_config(folder, dtype="float32").vocab_size, _stop_tokens(folder)
    path = folder / _TOKENIZER
    if os.path.lexists(path):  # a link to nowhere too is a tokenizer that is broken
        try:
            tokenizer = FileTokenizer(path, stop_tokens)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"{path} has token ids up to {tokenizer.vocab_size - 1}, "
                f"expected them below the model's vocab_size = {vocab_size}"
            )
        return tokenizer
    for name in _OTHER_TOKENIZERS:
        if os.path.lexists(folder / name):
            raise CheckpointError(f"{folder} has {name}, expected {_TOKENIZER}: convert it first")
    if vocab_size < ByteTokenizer.vocab_size:
        raise CheckpointError(
            f"{folder} has no {_TOKENIZER} and vocab_size is {vocab_size}, "
            f"expected at least {ByteTokenizer.vocab_size} where tokens are bytes"
        )
    return ByteTokenizer(stop_tokens)


def _stop_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    names = [_CONFIG]
    if os.path.lexists(folder / _GENERATION):  # knows better: chats end with other tokens
        names.insert(0, _GENERATION)
    for values in (JsonObject(folder / name) for name in names):
        stop_tokens = values.get("eos_token_id", (int, list), [])
        stop_tokens = stop_tokens if isinstance(stop_tokens, list) else [stop_tokens]
        if not all(type(token) is int and 0 <= token < 2**31 for token in stop_tokens):
            raise values.error("eos_token_id", "a token id or a list of them")
        if stop_tokens:
            return tuple(stop_tokens)
    return ()


# --- tensors and their files ---


class _Source(NamedTuple):
    """Where the files have a leaf of `Decoder`.

    Attributes:
      tensors: Names by their places in the leaf, of the layers and experts that are stacked in it, and of
        tensors that have a share of its outputs each.
      shape: Of a tensor, where it has no other outputs.
      is_transposed: Stored `[out, in]`.
      rows: Which outputs of a tensor the leaf has; None for all.
      unit_axes: Axes of length 1 that a tensor has besides.
    """

    tensors: dict[tuple[Any, ...], str]
    shape: tuple[int, ...]
    is_transposed: bool
    rows: np.ndarray | None
    unit_axes: tuple[int, ...]

    @property
    def out_axis(self) -> int:
        """The axis of outputs in a tensor without unit axes."""
        return -2 if self.is_transposed else -1

    def file_shape(self, num_outputs: int) -> tuple[int, ...]:
        """Computes the shape of a tensor with all its outputs."""
        shape = list(self.shape)
        shape[self.out_axis] = num_outputs
        for axis in self.unit_axes:
            shape.insert(axis, 1)
        return tuple(shape)

    def from_file(self, tensor: np.ndarray) -> np.ndarray:
        """Returns what a place of the leaf has of a tensor."""
        tensor = np.squeeze(tensor, self.unit_axes)
        if self.rows is not None:
            tensor = np.take(tensor, self.rows, self.out_axis)
        return np.swapaxes(tensor, -1, -2) if self.is_transposed else tensor

    def into_file(self, part: np.ndarray, tensor: np.ndarray) -> None:
        """Writes what a place of the leaf has into a tensor."""
        part = np.swapaxes(part, -1, -2) if self.is_transposed else part
        rows = slice(None) if self.rows is None else self.rows
        outputs = np.moveaxis(np.squeeze(tensor, self.unit_axes), self.out_axis, 0)
        outputs[rows] = np.moveaxis(part, self.out_axis, 0)


def _source(decoder: Decoder, names: Names, path: tuple[Any, ...], shape: tuple[int, ...]) -> _Source:
    parameter = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    prefixes: dict[tuple[int, ...], str] = {(): ""}
    if parameter.startswith("layers."):
        _, nth, parameter = parameter.split(".", 2)
        prefixes = {(): f"{names['layers']}.{nth}."}
        if decoder.is_stacked:
            layer_ids = decoder.config.stacks[int(nth)]
            prefixes = {(i,): f"{names['layers']}.{layer_id}." for i, layer_id in enumerate(layer_ids)}
    stored, experts = find_stored(names, parameter), decoder.config.experts
    if experts is not None and "{expert}" in stored.names[0]:
        prefixes = {(*i, e): prefix for i, prefix in prefixes.items() for e in range(experts.num_experts)}
    num_shares, num_axes = len(stored.names), len(next(iter(prefixes)))
    size = shape[-1] // num_shares
    shares = [(..., slice(i * size, (i + 1) * size)) if num_shares > 1 else () for i in range(num_shares)]
    tensors = {
        (*place, *share): prefix + name.format(expert=place[-1] if place else None)
        for place, prefix in prefixes.items()
        for share, name in zip(shares, stored.names, strict=True)
    }
    shape, is_transposed = (*shape[num_axes:-1], size), parameter.endswith(".kernel") and not stored.is_in_out
    shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    return _Source(tensors, shape, is_transposed, stored.rows, stored.unit_axes)


def _file_shapes(sources: list[_Source]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors by name; a tensor has the outputs of all leaves that share it."""
    names = [(source, name) for source in sources for name in source.tensors.values()]
    num_outputs = collections.Counter()
    for source, name in names:
        num_outputs[name] += source.shape[source.out_axis]
    return {name: source.file_shape(num_outputs[name]) for source, name in names}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of an open file; nothing of it is read before `read`."""

    name: str
    path: pathlib.Path
    file: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def check(self, shape: tuple[int, ...]) -> None:
        if self.shape != shape:
            raise CheckpointError(f"{self.path}: {self.name} has shape {self.shape}, expected {shape}")
        dtype = self.file.get_slice(self.name).get_dtype()
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.path}: {self.name} has dtype {dtype}, expected one of {', '.join(_FLOATS)}"
            )

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def _open(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _Tensor]:
    """Every tensor of the checkpoint by name; the files stay open as long as `stack`."""
    if (folder / _WEIGHTS).exists():
        return _open_file(folder / _WEIGHTS, stack)
    if not (folder / _INDEX).exists():
        raise CheckpointError(f"{folder} has no {_WEIGHTS} and no {_INDEX}")
    index = JsonObject(folder / _INDEX)
    shard_of = index.get("weight_map", dict)
    tensors = {}
    for shard in sorted(set(map(str, shard_of.values()))):
        if pathlib.PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index.path} names {shard!r}, expected a safetensors file beside it")
        if not os.path.exists(folder / shard):  # `Path.exists` raises where the name is too long
            raise CheckpointError(f"{folder} has no {shard}, which {_INDEX} names")
        held, listed = _open_file(folder / shard, stack), {n for n in shard_of if shard_of[n] == shard}
        if held.keys() != listed:
            raise CheckpointError(
                f"{folder / shard} and {_INDEX} differ: only one of them has {_few(held.keys() ^ listed)}"
            )
        tensors |= held
    return tensors


def _open_file(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _Tensor]:
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="np"))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}"
        ) from error
    return {name: _Tensor(name, path, file) for name in file.keys()}


def _check_names(
    folder: pathlib.Path,
    stored: dict[str, _Tensor],
    wanted: Collection[str],
    allowed: set[str],
    left_out: Mapping[str, str],
) -> None:
    missing = set(wanted) - stored.keys()
    if missing:
        raise CheckpointError(f"{folder} has no tensor {_few(missing)}")
    for what, number in collections.Counter(left_out.values()).items():
        _LOGGER.warning("%s: %d tensors of %s are left out", folder, number, what)
    unknown = stored.keys() - set(wanted) - allowed - left_out.keys()
    if unknown:
        raise CheckpointError(f"{folder} has the unknown tensor {_few(unknown)}")


def _check_same(folder: pathlib.Path, embedding: _Tensor, unembedding: _Tensor) -> None:
    """The two of a tied matrix, of which the first is checked already; NaN is the same as NaN."""
    unembedding.check(embedding.shape)
    if not np.array_equal(unembedding.read(), embedding.read(), equal_nan=True):
        raise CheckpointError(
            f"{folder}: {unembedding.name} differs from {embedding.name}, expected them equal: "
            "tie_word_embeddings is true"
        )


def _few(names: Collection[str]) -> str:
    shown, num_more = sorted(names)[:3], len(names) - 3
    return ", ".join(shown) + (f" and {num_more} more" if num_more > 0 else "")
