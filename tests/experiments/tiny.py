"""A model that computes in no time, for the tests of studies."""

from typing import Any

from flax import nnx

from models.decoder import Decoder, DecoderConfig

SIZES: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=16,
    mlp_size=16,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    use_qk_norm=True,
    tie_embeddings=True,
)
ONE_LAYER: dict[str, Any] = dict(num_layers=1, num_q_heads=2, num_kv_heads=1)


def config(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**SIZES, **changes})


def decoder(**changes: Any) -> Decoder:
    return Decoder(config(**changes), rngs=nnx.Rngs(0))
