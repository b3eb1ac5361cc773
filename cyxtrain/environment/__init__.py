"""Who this process is and what its machine offers: variables, schedulers, cores, accelerators. No sockets."""
