"""Mixtral: Mistral with a mixture of experts in every layer."""

from models.families.aspects import ALL_WINDOWS, ROPE, compose, experts, heads
from models.tensor_names import Names

EXPERTS = {
    "num_experts": "num_local_experts",
    "num_used": "num_experts_per_tok",
    "expert_size": "intermediate_size",
}
NAMES: Names = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.expert_gate": "block_sparse_moe.experts.{expert}.w1",
    "mlp.expert_up": "block_sparse_moe.experts.{expert}.w3",
    "mlp.expert_down": "block_sparse_moe.experts.{expert}.w2",
}
MIXTRAL = compose(
    "MixtralForCausalLM",
    heads(),
    ALL_WINDOWS,
    ROPE,
    experts(EXPERTS, normalizes=True),
    entries=EXPERTS,
    defaults={"rope_theta": 1_000_000.0},
    names=lambda config: NAMES,
)
