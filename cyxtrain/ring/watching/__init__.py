"""Beside the ring: whether the others live, why a group ends, and who holds all up.

watch is the thread that listens; pulse and waits judge what it hears, and doing says what a rank does.
"""
