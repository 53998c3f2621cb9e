"""What a decoder is: its sizes and options."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp

import kvcache_jax as kv
from models.checks import check_positive, check_positive_or_none, float_dtype
from models.layer_runs import Run, layer_runs
from models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu", "relu2")
"""Names that `DecoderConfig.mlp_activation` takes."""

ATTENTION, RECURRENCE = "attention", "recurrence"
"""What mixes the tokens of a layer, see `DecoderConfig.mixers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latents:
    """Sizes of multi-head latent attention: all heads' keys and values are computed of one vector per token.

    Attributes:
      latent_dim: Width of that vector.
      rope_dim: Width of the part of a key that is rotated, one for all heads; even.
      nope_dim: Width of the part of a head's key that is not rotated.
      value_dim: Width of a head's value.
      q_rank: Width of the vector that a token's queries are computed of; None to compute them directly.
      norm_eps: Added to the mean square in the norms of the two vectors.

    References:
      DeepSeek-V2 (DeepSeek-AI; arXiv:2405.04434).
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "latent_dim", "rope_dim", "nope_dim", "value_dim", "norm_eps")
        check_positive_or_none(self, "q_rank")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}, expected an even number: pairs are rotated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Sizes and options of mixtures of experts, which later layers have in place of an MLP.

    Attributes:
      first_layer: Layers before it have an MLP.
      num_experts: Experts of a layer.
      num_used: Experts that a token uses.
      expert_size: Width inside an expert.
      shared_size: Width inside the MLP that all tokens use; None without one.
      use_shared_gate: Whether each token weighs what that MLP says (Qwen3-Next).
      use_biases: Biases on the router and the experts (gpt-oss).
      is_sigmoid: Whether scores are sigmoids, a learned correction is added to them for the choice, and a
        group counts as its two best experts (DeepSeek-V3); else a softmax scores, and it counts as its best.
      num_groups: Groups of experts side by side, equally large.
      num_used_groups: Groups among whose experts a token chooses.
      normalizes: Whether the weights of a token's experts are divided by their sum.
      weight_scale: Multiplies these weights.
    """

    first_layer: int
    num_experts: int
    num_used: int
    expert_size: int
    shared_size: int | None = None
    use_shared_gate: bool = False
    use_biases: bool = False
    is_sigmoid: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    normalizes: bool = False
    weight_scale: float = 1.0

    def __post_init__(self):
        check_positive(self, "num_experts", "num_used", "expert_size", "num_groups")
        check_positive(self, "num_used_groups", "weight_scale")
        check_positive_or_none(self, "shared_size")
        if self.use_shared_gate and self.shared_size is None:
            raise ValueError("shared_size is None with use_shared_gate, expected the width of what it weighs")
        if self.use_biases and self.is_sigmoid:
            raise ValueError(
                "use_biases is True with is_sigmoid, expected False: a sigmoid's bias is a correction"
            )
        least = 2 * self.num_groups if self.is_sigmoid and self.num_groups > 1 else self.num_groups
        if self.num_experts % self.num_groups or self.num_experts < least:
            raise ValueError(
                f"num_experts is {self.num_experts}, expected a multiple of num_groups = {self.num_groups}, "
                f"at least {least}"
            )
        if self.num_used_groups > self.num_groups:
            raise ValueError(
                f"num_used_groups is {self.num_used_groups}, expected at most num_groups = {self.num_groups}"
            )
        most = self.num_experts // self.num_groups * self.num_used_groups
        if self.num_used > most:
            raise ValueError(f"num_used is {self.num_used}, expected at most the {most} of a token's groups")


class Parts(NamedTuple):
    """What a layer consists of.

    Attributes:
      mixer: `ATTENTION`, `RECURRENCE` or None.
      has_mlp: Whether it has an MLP, or experts.
      experts: In place of an MLP; else None.
    """

    mixer: str | None
    has_mlp: bool
    experts: Experts | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options; hashable, the static part of a `Decoder`.

    Attributes:
      vocab_size: Token ids are below it; another id turns its row's logits into NaN.
      hidden_size: Width of the residual stream.
      mlp_size: Width inside an MLP.
      num_layers: Layers.
      num_q_heads: Query heads, a multiple of `num_kv_heads`.
      num_kv_heads: Key and value heads; with `latents` as many as query heads.
      head_dim: Width of a query and a key, even; need not be `hidden_size / num_q_heads`. With `latents`
        `nope_dim + rope_dim`.
      max_seq_len: Longest sequence that the model is meant for.
      windows: Per layer the tokens in reach, None for all of them; empty if it is None everywhere.
      recurrence: The kind of recurrent layers, `kv.GatedDeltaNet`, `kv.Mamba2` or `kv.ShortConvolution`.
      mixers: Per layer what mixes tokens, `ATTENTION` or `RECURRENCE`; empty if it is attention everywhere.
      has_split_layers: Whether a layer is a mixer or an MLP, None in `mixers`, but not both (Nemotron-H).
      rope: The rotations; None for keys and queries that are not rotated.
      rotated: Per layer whether it has rotations (SmolLM 3); empty if all layers have them.
      window_rope: The rotations of layers with a window, where they differ (Gemma 3); else None.
      latents: Multi-head latent attention (DeepSeek); None for keys and values of their own.
      experts: Mixtures of experts in place of later layers' MLPs (DeepSeek); None for MLPs everywhere.
      norm_eps: Added to the mean square in every norm.
      norm_offset: Added to every norm's scale (Gemma: 1).
      use_pre_norms: Norms of what attention and MLP get; only OLMo 2 and 3 have none.
      use_post_norms: Norms of what attention and MLP add to the residual stream (Gemma, OLMo 2, GLM-4).
      use_qkv_bias: Biases on queries, keys and values (Qwen2).
      use_out_bias: A bias on what attention says.
      use_mlp_bias: Biases in MLPs; experts have their own option.
      use_qk_norm: Norms of each head's query and key (Qwen3, Gemma 3).
      qk_norm_spans_heads: These are norms of all heads together (OLMo 2).
      use_sink_logits: A learned logit per head that takes attention and adds nothing (gpt-oss).
      use_attention_gate: Multiplies what attention says by a sigmoid of each token (Qwen3-Next).
      mlp_activation: In an MLP, one of `ACTIVATIONS`: of its gate, "clamped_silu" of gate and values within
        bounds (gpt-oss), or "relu2" of an MLP without a gate.
      embedding_scale: Multiplies what a token is embedded as (Gemma: the root of `hidden_size`).
      residual_scale: Multiplies what a layer's parts add to the residual stream (Granite).
      attention_scale: Multiplies the logits of attention; None for `head_dim ** -0.5`.
      attention_soft_cap: Bounds the logits of attention (Gemma 2): `cap * tanh(logits / cap)`.
      logits_divisor: Divides the logits of tokens (Granite).
      final_soft_cap: Bounds the logits of tokens in the same way (Gemma 2).
      tie_embeddings: Logits come from the token embedding, not from a matrix of their own.
      dtype: Of the computation, float32 or bfloat16. Norms, rotations and logits are float32 inside.
      param_dtype: Of the parameters, float32 or bfloat16.
      matmul_dtype: Of the products in `Linear`, float32 or bfloat16; None for `dtype`.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int = 8192
    windows: tuple[int | None, ...] = ()
    recurrence: kv.Recurrent | None = None
    mixers: tuple[str | None, ...] = ()
    has_split_layers: bool = False
    rope: Rope | None = Rope()
    rotated: tuple[bool, ...] = ()
    window_rope: Rope | None = None
    latents: Latents | None = None
    experts: Experts | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    use_pre_norms: bool = True
    use_post_norms: bool = False
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    use_mlp_bias: bool = False
    use_qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    use_sink_logits: bool = False
    use_attention_gate: bool = False
    mlp_activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_divisor: float = 1.0
    final_soft_cap: float | None = None
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    matmul_dtype: Any = None

    def __post_init__(self):
        is_windowed = any(window is not None for window in self.windows)
        object.__setattr__(self, "windows", tuple(self.windows) if is_windowed else ())
        is_mixed = any(mixer != ATTENTION for mixer in self.mixers)
        object.__setattr__(self, "mixers", tuple(self.mixers) if is_mixed else ())
        object.__setattr__(self, "rotated", () if all(self.rotated) else tuple(self.rotated))
        if not is_windowed or self.window_rope == self.rope:
            object.__setattr__(self, "window_rope", None)
        for name in ("dtype", "param_dtype", "matmul_dtype"):
            if name == "matmul_dtype" and self.matmul_dtype is None:
                continue
            object.__setattr__(self, name, float_dtype(name, getattr(self, name)))
        check_positive(self, "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads")
        check_positive(self, "num_kv_heads", "head_dim", "max_seq_len", "norm_eps", "embedding_scale")
        check_positive(self, "residual_scale", "logits_divisor")
        check_positive_or_none(self, "attention_scale", "attention_soft_cap", "final_soft_cap")
        heads = self.num_q_heads, self.num_kv_heads
        if heads[0] % heads[1]:
            raise ValueError(f"num_q_heads is {heads[0]}, expected a multiple of num_kv_heads = {heads[1]}")
        if self.latents is None and self.rope is not None and self.rope_dim % 2:
            share = "" if self.rope.share == 1 else f" and {self.rope.share} of it are rotated"
            raise ValueError(
                f"head_dim is {self.head_dim}{share}, expected an even number: halves are rotated"
            )
        for name in ("windows", "mixers", "rotated"):
            if (num := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{name} has {num} entries, expected {self.num_layers} or none")
        if self.mlp_activation not in ACTIVATIONS:
            raise ValueError(
                f"mlp_activation is {self.mlp_activation!r}, expected one of {', '.join(ACTIVATIONS)}"
            )
        self._check_mixers()
        if self.latents is not None:
            self._check_latents(self.latents)
        first, last = self.experts.first_layer if self.experts else 0, self.num_layers - 1
        if not 0 <= first <= last:
            raise ValueError(f"first_layer is {first}, expected 0 to num_layers - 1 = {last}")

    def _check_mixers(self) -> None:
        known = (ATTENTION, RECURRENCE, None) if self.has_split_layers else (ATTENTION, RECURRENCE)
        unknown = [mixer for mixer in self.mixers if mixer not in known]
        if unknown:
            raise ValueError(f"mixers has {unknown[0]!r}, expected entries of {', '.join(map(str, known))}")
        if all(mixer is None for mixer in self.layer_mixers):
            raise ValueError("mixers is None everywhere, expected a layer that mixes tokens")
        if (self.recurrence is not None) != (RECURRENCE in self.mixers):
            raise ValueError(
                f"recurrence is {self.recurrence} and mixers is {self.mixers}, expected a kind where layers "
                f"are {RECURRENCE!r}, else None"
            )

    def _check_latents(self, latents: Latents) -> None:
        if self.windows:
            raise ValueError(
                f"windows is {self.windows} with latents, expected none: no layer kind keeps latents of the "
                "last tokens alone; let all layers see all tokens"
            )
        if self.num_kv_heads != self.num_q_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} with latents, expected num_q_heads = {self.num_q_heads}"
            )
        if self.head_dim != latents.nope_dim + latents.rope_dim:
            raise ValueError(
                f"head_dim is {self.head_dim}, expected nope_dim + rope_dim = "
                f"{latents.nope_dim + latents.rope_dim}"
            )
        options = "use_qkv_bias", "use_out_bias", "use_qk_norm", "use_sink_logits", "use_attention_gate"
        unused = [name for name in options if getattr(self, name)]
        if unused:
            raise ValueError(f"{unused[0]} is True with latents, expected False: latents have none of these")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.windows or (None,) * self.num_layers

    @property
    def layer_mixers(self) -> tuple[str | None, ...]:
        """What mixes tokens in each layer."""
        return self.mixers or (ATTENTION,) * self.num_layers

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The rotations of each layer."""
        ropes = {True: self.rope, False: self.window_rope or self.rope}
        rotated = self.rotated or (True,) * self.num_layers
        return tuple(
            ropes[window is None] if is_rotated else None
            for window, is_rotated in zip(self.layer_windows, rotated, strict=True)
        )

    @property
    def layer_parts(self) -> tuple[Parts, ...]:
        """What each layer consists of."""

        def parts(layer: int, mixer: str | None) -> Parts:
            has_mlp = mixer is None or not self.has_split_layers
            has_experts = has_mlp and self.experts is not None and layer >= self.experts.first_layer
            return Parts(mixer, has_mlp, self.experts if has_experts else None)

        return tuple(parts(layer, mixer) for layer, mixer in enumerate(self.layer_mixers))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers whose parts, windows and rotations repeat."""
        return layer_runs(tuple(zip(self.layer_windows, self.layer_ropes, self.layer_parts, strict=True)))

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each stack: all layers of a run that consist of the same."""
        of_layer = self.layer_parts
        return tuple(
            tuple(layer for layer in run.layer_ids if of_layer[layer] == parts)
            for run in self.runs
            for parts in dict.fromkeys(of_layer[run.start :][: run.period])
        )

    @property
    def cache_layers(self) -> tuple[int | None, ...]:
        """The number of each layer in the cache; None for an MLP alone, which keeps nothing."""
        numbers = itertools.count()
        return tuple(None if mixer is None else next(numbers) for mixer in self.layer_mixers)

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated."""
        if self.latents is not None:
            return self.latents.rope_dim
        return self.head_dim if self.rope is None else int(self.head_dim * self.rope.share)
