"""Implementations of attention: their parts and their registration."""

from kvcache_jax.core.backends import Backend, TargetDevice, register_backend

__all__ = [
    "Backend",
    "TargetDevice",
    "register_backend",
]
