"""The command line: `python -m cyxtrain.launch 4 python train.py` starts four ranks on this machine."""
