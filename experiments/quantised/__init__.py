"""Keys and values in few bits: their bytes, what they cost a model, and the time of a step."""
