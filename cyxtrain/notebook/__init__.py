"""A notebook's fit, evaluate and predict in worker processes: pool, calls, transfer of state, output."""
