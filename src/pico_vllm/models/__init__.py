"""Model definitions as the papers read, and how checkpoints become their parameters."""
