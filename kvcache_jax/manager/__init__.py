"""Requests by id on the host: a cache manager that owns its cache."""
