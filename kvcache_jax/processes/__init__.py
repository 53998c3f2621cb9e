"""Other processes: engines on a mesh of several, and events by which routers know what a cache holds."""

from kvcache_jax.core.team import ProcessLost
from kvcache_jax.processes.distributed_team import DistributedTeam
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
    "DistributedTeam",
    "EventPublisher",
    "IndexFollower",
    "ProcessLost",
]
