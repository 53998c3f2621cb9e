"""The mutations of `models/`: rotations, norms, caps, latents, and what config.json says of them."""

from tests.mutants.mutations import Mutation

ONE_CALL = "models/test_decoder.py::test_logits_of_one_call_are_those_of_transformers"
GEMMA2, GEMMA3 = f"{ONE_CALL}[gemma2]", f"{ONE_CALL}[gemma3]"
DEEPSEEK_V2, DEEPSEEK_V3 = f"{ONE_CALL}[deepseek_v2]", f"{ONE_CALL}[deepseek_v3]"
V2_EXPERTS, V3_EXPERTS = f"{ONE_CALL}[deepseek_v2_experts]", f"{ONE_CALL}[deepseek_v3_experts]"
FAMILIES = "models/test_families.py"
ABSORBED = f"{FAMILIES}::test_latents_are_expanded_where_a_row_has_room_for_more_than_128_tokens"
EXPANDED = f"{FAMILIES}::test_prompts_of_other_lengths[deepseek_v2-300]"
CONFIGS = "models/test_family_configs.py"
PUBLISHED_GEMMA = f"{CONFIGS}::test_gemmas_as_they_were_published_are_read"
PUBLISHED_DEEPSEEK = f"{CONFIGS}::test_deepseeks_as_they_were_published_are_read"
NOT_SAVED = "models/test_checkpoint.py::test_a_model_that_no_family_has_is_not_saved"


def _in_models(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    return [Mutation(name, f"models/{module}.py", *rest) for name, *rest in mutations]


MUTATIONS = [
    *_in_models(
        "rope",
        ("halves are turned for pairs", "if rotation.is_interleaved:", "if False:", DEEPSEEK_V3),
        ("stretched rotations have length 1", "if rope.amplitude != 1:", "if False:", DEEPSEEK_V2),
        ("no rotation is slowed evenly", "return frequencies / self.factor", "return frequencies", GEMMA3),
        ("slow pairs stay fast", "1 - share_slowed + share_slowed / self.factor", "1", DEEPSEEK_V2),
        ("fast pairs are slowed", "max(first, 0), min(last, dim - 1)", "-1, min(last, dim - 1)", DEEPSEEK_V2),
    ),
    *_in_models(
        "config",
        ("windows turn as all layers do", "False: self.window_rope or self.rope", "False: self.rope", GEMMA3),
        (
            "latents in windows are taken for full ones",
            "        if self.windows:\n            raise",
            "        if False:\n            raise",
            "models/test_decoder.py::test_an_impossible_config_is_refused",
        ),
    ),
    *_in_models(
        "layers",
        ("scales are taken as stored", "self.offset + self.scale[...]", "self.scale[...]", GEMMA2),
        ("an exact gate for the tanh's", "approximate=True", "approximate=False", GEMMA2),
        (
            "a cap that only bends",
            "return x if cap is None else cap *",
            "return x if cap is None else",
            GEMMA2,
        ),
    ),
    *_in_models(
        "attention",
        (
            "logits of attention without a cap",
            "step, scale=self.scale, soft_cap=self.soft_cap",
            "step, scale=self.scale",
            GEMMA2,
        ),
        ("a scale of its own is not used", "step, scale=self.scale, soft", "step, soft", GEMMA2),
        ("the shared part of keys stands still", "rotate(k_rope, rotation)", "k_rope", DEEPSEEK_V3),
        ("latents without their norm", "self.kv_norm(latent)", "latent", DEEPSEEK_V3),
        ("queries without their norm", "self.q_norm(self.q_down(x))", "self.q_down(x)", DEEPSEEK_V3),
        (
            "norms of latents with the model's epsilon",
            "config, latents.latent_dim, eps",
            "config, latents.latent_dim",
            DEEPSEEK_V3,
        ),
        (
            "keys and values of a latent change places",
            'weights=None if is_absorbed else {"k": w_k, "v": w_v}',
            'weights=None if is_absorbed else {"k": w_k, "v": -w_v}',
            EXPANDED,
        ),
        (
            "wide steps read latents as they are",
            "x.shape[1] <= MOST_ABSORBED",
            "x.shape[1] <= 2 * MOST_ABSORBED",
            ABSORBED,
        ),
        (
            "a step as wide as the limit is expanded",
            "x.shape[1] <= MOST_ABSORBED",
            "x.shape[1] < MOST_ABSORBED",
            ABSORBED,
        ),
    ),
    *_in_models(
        "decoder",
        ("embeddings are not enlarged", "if self.config.embedding_scale != 1:", "if False:", GEMMA2),
        (
            "logits of tokens without a cap",
            "soft_capped(logits, self.config.final_soft_cap)",
            "logits",
            GEMMA2,
        ),
        ("a period turns as its first layer", "step, turns[i])", "step, turns[0])", GEMMA3),
        (
            "attention adds without its norm",
            "(out if self.attention_post_norm is None else self.attention_post_norm(out))",
            "out",
            GEMMA2,
        ),
        (
            "the MLP adds without its norm",
            "(out if self.mlp_post_norm is None else self.mlp_post_norm(out))",
            "out",
            GEMMA2,
        ),
    ),
    *_in_models(
        "mixture",
        ("experts of all groups are chosen", "if sizes.num_groups > 1:", "if False:", V2_EXPERTS),
        ("a group counts as its best", "2 if sizes.is_sigmoid else 1", "1", V3_EXPERTS),
        ("corrections move weights", "take_along_axis(scores,", "take_along_axis(ranks,", V3_EXPERTS),
        ("weights of experts as they are", "if sizes.normalizes:", "if False:", V3_EXPERTS),
        ("weights of experts are not enlarged", "sizes.weight_scale * weights", "weights", V2_EXPERTS),
        ("experts of others' tokens", "tokens[order // num_used]", "tokens[order % len(tokens)]", V2_EXPERTS),
        (
            "no MLP for all tokens",
            "mixed.reshape(x.shape) + self.shared(x)",
            "mixed.reshape(x.shape)",
            V2_EXPERTS,
        ),
    ),
    *_in_models(
        "tensor_names",
        (
            "the norms around the sum behind attention change places",
            '"attention_post_norm": "post_attention_layernorm",\n    "mlp_norm": "pre_feedforward_layernorm"',
            '"attention_post_norm": "pre_feedforward_layernorm",\n    "mlp_norm": "post_attention_layernorm"',
            GEMMA2,
        ),
    ),
    *_in_models(
        "families/deepseek",
        (
            "mscale enters the scale once",
            "scaling.length(scaling.mscale_all_dim) ** 2",
            "scaling.length(scaling.mscale_all_dim)",
            DEEPSEEK_V2,
        ),
    ),
    *_in_models(
        "families/gemma",
        (
            "the first layer of a period sees all",
            "if (layer + 1) % period",
            "if layer % period",
            PUBLISHED_GEMMA,
        ),
        (
            "windows have the base of all layers",
            '"rope_local_base_freq", NUMBER, 10_000.0',
            '"rope_theta", NUMBER, 10_000.0',
            PUBLISHED_GEMMA,
        ),
    ),
    *_in_models(
        "json_object",
        (
            "a default goes before what is said",
            "{**defaults, **self.values}",
            "{**self.values, **defaults}",
            PUBLISHED_GEMMA,
        ),
    ),
    *_in_models(
        "config_json",
        ("a model is saved as one that it is not", "if again == wanted:", "if True:", NOT_SAVED),
    ),
]
