"""Arrays and nothing of caches: masked updates, sharding types, checks of numbers."""
