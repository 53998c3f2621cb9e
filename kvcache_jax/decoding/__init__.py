"""Loops for any model: generate, beam search, scoring, speculation."""

from kvcache_jax.decoding.beam_search import Beam, BeamResult
from kvcache_jax.decoding.forward import PreparedForward, for_logits, prepared
from kvcache_jax.decoding.generate import GenerateResult
from kvcache_jax.decoding.host import Generation, Snapshot
from kvcache_jax.decoding.options import Drafts, SamplingParams, StopStrings, Watch
from kvcache_jax.decoding.prompts import PromptCall, PromptRows, PromptSource, Retention
from kvcache_jax.decoding.score import ScoreResult

__all__ = [
    "Beam",
    "BeamResult",
    "Drafts",
    "GenerateResult",
    "Generation",
    "PromptCall",
    "PreparedForward",
    "PromptRows",
    "PromptSource",
    "Retention",
    "SamplingParams",
    "ScoreResult",
    "Snapshot",
    "StopStrings",
    "Watch",
    "for_logits",
    "prepared",
]
