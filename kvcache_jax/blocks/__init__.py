"""Who holds which block, and the movement of keys and values between blocks."""
