"""The definition of a cache: config, layer kinds, state, statuses, checks of arguments."""
