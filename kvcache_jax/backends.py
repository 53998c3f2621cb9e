"""Implementations of attention: what one has, and how it is registered."""

from kvcache_jax.core.backends import Backend, TargetDevice, register_backend

__all__ = [
    "Backend",
    "TargetDevice",
    "register_backend",
]
