"""What tiers of blocks are worth: restarts, hit rates, times to first token, and the speed of stores."""
