"""Equal parameters and buffers on every rank: broadcast, compare, hash."""
