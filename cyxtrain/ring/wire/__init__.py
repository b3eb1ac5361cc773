"""Connections, frames and transfers between two ranks, and the executor that runs a schedule over them."""
