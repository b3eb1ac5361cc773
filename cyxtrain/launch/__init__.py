"""The command line: `cyxtrain fit FILE`, `cyxtrain launch -n 4 -- python train.py`, and what helps with them."""
