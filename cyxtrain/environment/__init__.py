"""Process and machine: variables, schedulers, cores, accelerators, files, versions of PyTorch."""
