"""A model's outputs outside `fit`: gathered from all ranks, or in files, as `predict` writes them."""
