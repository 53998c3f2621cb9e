"""Tokens that go: drop, compress, the scores that choose, streaming."""
