"""What one model layer keeps per token: a file per kind."""
