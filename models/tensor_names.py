"""Names that tensors of published checkpoints have, and what `Decoder` calls them."""

from models.config import DecoderConfig

EMBEDDING, UNEMBEDDING = "model.embed_tokens", "lm_head"
OUTER = {"embedding": EMBEDDING, "unembedding": UNEMBEDDING, "norm": "model.norm"}
"""Beside the layers, the last part of the name left out."""

_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LATENTS = {
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
}
_RANKED_QUERIES = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q": "self_attn.q_b_proj",
}
_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.expert_gate": "mlp.experts.{expert}.gate_proj",
    "mlp.expert_up": "mlp.experts.{expert}.up_proj",
    "mlp.expert_down": "mlp.experts.{expert}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
# Gemma calls by the others' name of the norm before the MLP one that stands elsewhere.
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def layer_tensor(config: DecoderConfig, module: str, parameter: str) -> str:
    """Returns the name of a module's kernel, scale or bias within a layer; {expert} is each expert."""
    if (module, parameter) == ("mlp.router", "bias"):
        return "mlp.gate.e_score_correction_bias"
    return f"{_layer_names(config)[module]}.{'bias' if parameter == 'bias' else 'weight'}"


def _layer_names(config: DecoderConfig) -> dict[str, str]:
    names = _LAYER | _EXPERTS | (_POST_NORMS if config.use_post_norms else {})
    if config.latents is not None:
        names |= _LATENTS | ({} if config.latents.q_rank is None else _RANKED_QUERIES)
    return names
