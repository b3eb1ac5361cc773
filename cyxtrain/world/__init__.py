"""From init to finalize: joining, the collectives, and small agreements between ranks. No training."""
