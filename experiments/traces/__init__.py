"""Recorded requests: how much of them the prefix cache serves, by its size and eviction policy."""
