"""Conversations that come back: what their turns leave in the cache, and the policies that keep it."""
