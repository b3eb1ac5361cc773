"""Where rows come from: arrays, datasets, streams. No batches."""
