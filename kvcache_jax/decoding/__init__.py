"""Loops for anybody's model: generate, beam search, scoring, speculation."""
