"""Ranks find each other, prove who they are, and connect every pair; strangers are turned away.

store opens the store of rank 0, which key_values serves to members (pytorch_store: PyTorch's, where it needs one);
board reads and writes it, entry is what a rank writes there, rollcall waits for all. calling and door are the two sides
of a connection, handshake what both say first; agreement compares what all have read. rendezvous puts it together.
"""
