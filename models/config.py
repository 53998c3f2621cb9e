"""What a decoder is: its sizes and options."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from models.checks import check_positive, check_positive_or_none, float_dtype
from models.layer_runs import Run, layer_runs
from models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh")
"""Names that `DecoderConfig.mlp_activation` takes."""


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
      num_shared: How many times as wide the MLP is that all tokens use.
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
    num_shared: int
    is_sigmoid: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    normalizes: bool = False
    weight_scale: float = 1.0

    def __post_init__(self):
        check_positive(self, "num_experts", "num_used", "expert_size", "num_shared", "num_groups")
        check_positive(self, "num_used_groups", "weight_scale")
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
      rope: The rotations.
      window_rope: Those of layers with a window, where they differ (Gemma 3); else None.
      latents: Multi-head latent attention (DeepSeek); None for keys and values of their own.
      experts: Mixtures of experts in place of later layers' MLPs (DeepSeek); None for MLPs everywhere.
      norm_eps: Added to the mean square in every norm.
      norm_offset: Added to every norm's scale (Gemma: 1).
      use_post_norms: Gemma's norms of what attention and MLP add to the residual stream.
      use_qkv_bias: Qwen2's biases on queries, keys and values.
      use_qk_norm: Norms of each head's query and key (Qwen3, Gemma 3).
      mlp_activation: Of the gate in an MLP, one of `ACTIVATIONS`.
      embedding_scale: Multiplies what a token is embedded as (Gemma: the root of `hidden_size`).
      attention_scale: Multiplies the logits of attention; None for `head_dim ** -0.5`.
      attention_soft_cap: Bounds the logits of attention (Gemma 2): `cap * tanh(logits / cap)`.
      final_soft_cap: Bounds the logits of tokens likewise.
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
    rope: Rope = Rope()
    window_rope: Rope | None = None
    latents: Latents | None = None
    experts: Experts | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    use_post_norms: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = False
    mlp_activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    matmul_dtype: Any = None

    def __post_init__(self):
        is_windowed = any(window is not None for window in self.windows)
        object.__setattr__(self, "windows", tuple(self.windows) if is_windowed else ())
        if not is_windowed or self.window_rope == self.rope:
            object.__setattr__(self, "window_rope", None)
        for name in ("dtype", "param_dtype", "matmul_dtype"):
            if name == "matmul_dtype" and self.matmul_dtype is None:
                continue
            object.__setattr__(self, name, float_dtype(name, getattr(self, name)))
        check_positive(self, "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads")
        check_positive(self, "num_kv_heads", "head_dim", "max_seq_len", "norm_eps", "embedding_scale")
        check_positive_or_none(self, "attention_scale", "attention_soft_cap", "final_soft_cap")
        heads = self.num_q_heads, self.num_kv_heads
        if heads[0] % heads[1]:
            raise ValueError(f"num_q_heads is {heads[0]}, expected a multiple of num_kv_heads = {heads[1]}")
        if self.latents is None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even number: halves are rotated")
        if len(self.windows) not in (0, self.num_layers):
            raise ValueError(f"windows has {len(self.windows)} entries, expected {self.num_layers} or none")
        if self.mlp_activation not in ACTIVATIONS:
            raise ValueError(
                f"mlp_activation is {self.mlp_activation!r}, expected one of {', '.join(ACTIVATIONS)}"
            )
        if self.latents is not None:
            self._check_latents(self.latents)
        first, last = self.experts.first_layer if self.experts else 0, self.num_layers - 1
        if not 0 <= first <= last:
            raise ValueError(f"first_layer is {first}, expected 0 to num_layers - 1 = {last}")

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
        unused = [name for name in ("use_qkv_bias", "use_qk_norm") if getattr(self, name)]
        if unused:
            raise ValueError(f"{unused[0]} is True with latents, expected False: latents have neither")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.windows or (None,) * self.num_layers

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        """The rotations of each layer."""
        ropes = {True: self.rope, False: self.window_rope or self.rope}
        return tuple(ropes[window is None] for window in self.layer_windows)

    @property
    def layer_experts(self) -> tuple[Experts | None, ...]:
        """The experts of each layer; None where it has an MLP."""
        first = self.num_layers if self.experts is None else self.experts.first_layer
        return tuple(self.experts if layer >= first else None for layer in range(self.num_layers))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers whose windows, and with them their rotations, repeat; a run has experts or MLPs."""
        return layer_runs(tuple(zip(self.layer_windows, self.layer_experts, strict=True)))

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated."""
        return self.head_dim if self.latents is None else self.latents.rope_dim
