"""Blocks found by their contents: hashes, the index, eviction."""
