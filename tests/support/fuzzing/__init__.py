"""Random training programs, and what must agree about each: ranks, a plain loop, transports, a pool, resumed runs."""
