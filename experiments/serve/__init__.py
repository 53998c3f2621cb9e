"""The engine at work: real requests, several ways to schedule them, and machines that are only named."""
