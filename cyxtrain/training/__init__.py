"""The loop: fit, epoch, step, and what is trained."""
