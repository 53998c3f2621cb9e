"""What a model needs of a device's memory: bytes per token, rows that fit, hits of a trace."""
