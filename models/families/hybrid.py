"""What config.json says of models with recurrent layers, and how Mamba-2's tensors are called."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig
from models.families.family import FULL, LINEAR, write_fields
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

LAYER_TYPES = {LINEAR: RECURRENCE, FULL: ATTENTION}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """The mixers of a family.

    Attributes:
      kind: Of its recurrent layers.
      sizes: The entries of the kind's fields.
      options: What the kind has in all models of the family.
      types: What the types of layers stand for.
      entry: Lists the types.
    """

    kind: type[kv.Recurrent]
    sizes: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    types: Mapping[str, str | None] = dataclasses.field(default_factory=lambda: LAYER_TYPES)
    entry: str = "layer_types"

    def read(self, values: JsonObject, implied: Sequence[str] | None = None) -> dict[str, Any]:
        """Reads `mixers` and `recurrence`; the `implied` types, where there are any, if none are listed."""
        types = values.get(self.entry, list, ... if implied is None else list(implied))
        if any(each not in self.types for each in types):
            raise values.error(self.entry, f"{', '.join(self.types)} for each layer")
        mixers = tuple(self.types[each] for each in types)
        has_recurrence = RECURRENCE in mixers
        kind = values.read(self.kind, self.sizes, **self.options) if has_recurrence else None
        return {"mixers": mixers, "recurrence": kind}

    def write(self, config: DecoderConfig) -> dict[str, Any] | None:
        """Computes the inverse of `read`; None for a model that mixes tokens otherwise."""
        types = {mixer: each for each, mixer in reversed([*self.types.items()])}
        kind, mixers = config.recurrence, config.layer_mixers
        if not types.keys() >= {*mixers} or not isinstance(kind, (self.kind, type(None))):
            return None
        sizes = {} if kind is None else write_fields(kind, self.sizes)
        return {self.entry: [types[mixer] for mixer in mixers], **sizes}


def refuse_time_step_limit(values: JsonObject) -> None:
    """Refuses bounds of Mamba-2's time steps; infinity is written in two ways."""
    limit = values.get("time_step_limit", list, [0.0, math.inf])
    if limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise values.error("time_step_limit", "0 to infinity: nothing else is implemented")


def mamba_names(module: str) -> Names:
    """Names the tensors of Mamba-2."""
    return {
        "recurrence.inputs": f"{module}.in_proj",
        "recurrence.convolution.kernel": Stored((f"{module}.conv1d.weight",), unit_axes=(1,)),
        "recurrence.convolution.bias": f"{module}.conv1d.bias",
        "recurrence.decay_rate": f"{module}.A_log",
        "recurrence.step_bias": f"{module}.dt_bias",
        "recurrence.skip": f"{module}.D",
        "recurrence.norm": f"{module}.norm",
        "recurrence.out": f"{module}.out_proj",
    }
