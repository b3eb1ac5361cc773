"""Schedules as pure data: which rank sends what to which. No sockets."""
