"""One training step: forward and backward, the verdict on it, updates, and what is put back if it is not taken."""
