"""Replicas of one model: simulated ones by policy, and engines on Ray Serve."""
