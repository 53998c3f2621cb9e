"""Continuous batching inside one compiled program, for anybody's model."""
