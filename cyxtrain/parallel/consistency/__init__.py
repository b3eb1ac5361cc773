"""Equal parameters and buffers on every rank: broadcast and compare."""
