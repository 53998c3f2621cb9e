"""Requests by id on the host: a cache manager that owns its cache."""

from kvcache_jax.manager.errors import (
    CacheError,
    CacheLost,
    DuplicateRequest,
    ManagerBusy,
    ManagerClosed,
    OutOfBlocks,
    OutOfRows,
    OutOfSync,
    StaleBatch,
    TooLong,
    UnknownRequest,
    WindowLost,
)

__all__ = [
    "CacheError",
    "CacheLost",
    "DuplicateRequest",
    "ManagerBusy",
    "ManagerClosed",
    "OutOfBlocks",
    "OutOfRows",
    "OutOfSync",
    "StaleBatch",
    "TooLong",
    "UnknownRequest",
    "WindowLost",
]
