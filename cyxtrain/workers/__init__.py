"""Processes of ranks on this machine: start, watch, label their output, stop. They know nothing of training."""
