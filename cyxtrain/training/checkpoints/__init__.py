"""When a fit saves, continuing from a checkpoint, and what differs from it. No file format."""
