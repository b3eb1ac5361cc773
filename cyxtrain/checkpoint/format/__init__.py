"""What the bytes of a checkpoint mean: archive, tensors, encoding, optimizer state. No folders."""
