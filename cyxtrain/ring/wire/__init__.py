"""Links, frames, transfers and arithmetic between ranks."""
