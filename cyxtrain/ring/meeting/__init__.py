"""Ranks find each other, prove who they are, and connect every pair; strangers are turned away.

store opens PyTorch's, board asks it, entry is what a rank says there, rollcall waits for all. calling and door are the
two sides of a connection, handshake what both say first. rendezvous puts it together.
"""
