"""From the data set to the batch: which rank sees which sample, and when. No training."""
