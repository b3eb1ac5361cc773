"""Heartbeats, aborts and who waits for whom, in the background. No collectives."""
