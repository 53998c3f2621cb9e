"""Other processes: engines on a mesh of several, events of what a cache holds, the choice among replicas."""

from kvcache_jax.core.team import ProcessLost
from kvcache_jax.processes.distributed_team import DistributedTeam, check_coordinator
from kvcache_jax.processes.event_publisher import EventPublisher
from kvcache_jax.processes.index_events import AllBlocksCleared, BlockRemoved, BlockStored, IndexFollower
from kvcache_jax.processes.replicas import Replica, ReplicaIndex, choose_replica, prompt_hashes

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "DistributedTeam",
    "EventPublisher",
    "IndexFollower",
    "ProcessLost",
    "Replica",
    "ReplicaIndex",
    "check_coordinator",
    "choose_replica",
    "prompt_hashes",
]
