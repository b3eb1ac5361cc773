"""The trainers; the loop (fit, epoch, step), evaluation, stopping, NaN checks, and the training state."""
