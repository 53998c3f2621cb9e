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
from kvcache_jax.manager.requests import Batch, Request

__all__ = [
    "Batch",
    "CacheError",
    "CacheLost",
    "DuplicateRequest",
    "ManagerBusy",
    "ManagerClosed",
    "OutOfBlocks",
    "OutOfRows",
    "OutOfSync",
    "Request",
    "StaleBatch",
    "TooLong",
    "UnknownRequest",
    "WindowLost",
]
