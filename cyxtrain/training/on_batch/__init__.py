"""Single batches outside `fit`: `train_on_batch`, `test_on_batch` and `predict_on_batch`."""
