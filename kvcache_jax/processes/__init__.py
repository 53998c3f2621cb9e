"""Other processes: events by which routers know what a cache holds."""

from kvcache_jax.processes.event_publisher import EventPublisher
from kvcache_jax.processes.index_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    IndexFollower,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventPublisher",
    "IndexFollower",
]
