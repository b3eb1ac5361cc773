"""Continue from a checkpoint, and report what differs from it. No file format."""
