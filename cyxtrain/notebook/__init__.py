"""Worker processes behind a notebook's fit, evaluate and predict. Above training."""
