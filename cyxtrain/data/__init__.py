"""From the data set to the batch: who sees which sample, and when."""
