"""How the model runs: forward, compile, recompute, memory, device."""
