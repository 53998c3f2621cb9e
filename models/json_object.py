"""The entries of a JSON file, and what is wrong with them."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

ENTRIES = {
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "mixers": "layer_types",
    "original_max_seq_len": "original_max_position_embeddings",
    "latent_dim": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
    "q_rank": "q_lora_rank",
    "first_layer": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_used": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "num_groups": "n_group",
    "num_used_groups": "topk_group",
    "weight_scale": "routed_scaling_factor",
    "attention_soft_cap": "attn_logit_softcapping",
    "final_soft_cap": "final_logit_softcapping",
}
"""What most families call fields of `DecoderConfig` and its parts in config.json, where names differ."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, or a model that cannot be saved; names what is wrong with it."""


class JsonObject:
    """The entries of a JSON file, asked for by type; errors name the file and the entry.

    Raises:
      CheckpointError: the file is missing, no JSON or no object.
    """

    def __init__(
        self,
        path: pathlib.Path,
        values: Mapping[str, Any] | None = None,
        prefix: str = "",
        entries: Mapping[str, str] = ENTRIES,
    ):
        self.path, self.prefix, self.entries = path, prefix, entries
        if values is None:
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (FileNotFoundError, NotADirectoryError):
                if path.parent.is_dir():
                    raise CheckpointError(f"{path.parent} has no {path.name}") from None
                what = "is no folder" if path.parent.exists() else "is not there"
                raise CheckpointError(
                    f"{path.parent} {what}, expected the folder that holds {path.name}"
                ) from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path} is not a whole JSON file: {error}") from error
            if not isinstance(values, dict):
                raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        self.values = values

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The entry; `default` where it is missing or null, which without a default is an error."""
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.path} has no {self.prefix}{name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise self.error(name, " or ".join(kind.__name__ for kind in kinds))
        return value

    def entry(self, field: str) -> str:
        """What the file calls a field."""
        return self.entries.get(field, field)

    def get_field(self, field: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The entry of a field, as `get`."""
        return self.get(self.entry(field), kind, default)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "JsonObject":
        """Fills in what missing entries stand for; null ones stay."""
        return JsonObject(self.path, {**defaults, **self.values}, self.prefix, self.entries)

    def with_entries(self, entries: Mapping[str, str]) -> "JsonObject":
        """Calls fields by other entries, too."""
        return JsonObject(self.path, self.values, self.prefix, {**self.entries, **entries})

    def part(self, name: str) -> "JsonObject":
        """The object under `name`; empty where it is missing or null."""
        return JsonObject(self.path, self.get(name, dict, {}), f"{self.prefix}{name}.", self.entries)

    def make[T](self, kind: type[T], **options: Any) -> T:
        """`kind(**options)`, whose options were read here: what it refuses is wrong in the file."""
        try:
            return kind(**options)
        except ValueError as error:
            message = re.sub(r"\w+", lambda word: self.entry(word[0]), str(error))
            raise CheckpointError(f"{self.path}: {self.prefix}{message}") from error

    def read[T](self, kind: type[T], entries: Mapping[str, str], **options: Any) -> T:
        """`kind(**options)`, and the whole numbers that `entries` names by field."""
        values = self.with_entries(entries)
        return values.make(kind, **{field: values.get_field(field, int) for field in entries}, **options)

    def error(self, name: str, expected: str) -> CheckpointError:
        """To be raised: what the entry is and what it should be."""
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} is {self.values.get(name)!r}, expected {expected}"
        )
