"""Processes of ranks on this machine: start, watch, label their output, stop; nothing of training."""
