"""Owners of blocks, and the movement of keys and values between blocks."""
