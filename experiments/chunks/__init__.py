"""Passages computed once and put into prompts at any place: what that costs in quality, and what it saves."""
