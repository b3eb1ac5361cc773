"""Schedules as pure data, which rank sends what to which, and the arithmetic of reductions. No sockets."""
