"""Continuous batching inside one compiled program, for any model."""

from kvcache_jax.core.attachment import Attachment
from kvcache_jax.engine.events import EngineFigures as Figures
from kvcache_jax.engine.events import TokenEvent
from kvcache_jax.engine.failure import EngineFailed
from kvcache_jax.engine.inputs import Inputs
from kvcache_jax.engine.options import Limits, Placement, Schedule
from kvcache_jax.engine.policies import RequestMetadata, request_policy
from kvcache_jax.engine.requests import Conversation
from kvcache_jax.engine.state import EngineCounter as Counter
from kvcache_jax.engine.state import EngineState as State
from kvcache_jax.engine.stop_text import StopStrings

__all__ = [
    "Attachment",
    "Conversation",
    "Counter",
    "EngineFailed",
    "Figures",
    "Inputs",
    "Limits",
    "Placement",
    "RequestMetadata",
    "Schedule",
    "State",
    "StopStrings",
    "TokenEvent",
    "request_policy",
]
