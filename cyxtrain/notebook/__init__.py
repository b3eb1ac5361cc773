"""Worker processes that run a notebook's fit, evaluate and predict. Above training."""
