"""Links, frames and transfers between ranks."""
