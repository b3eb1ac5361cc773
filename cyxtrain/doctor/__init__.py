"""`cyxtrain doctor`: check this machine, or the network between ranks, without joining; measure virtual ranks.

1. `examine`: one process, or ranks that find each other; the exit code.
2. `local_checks`: what a process finds on its machine.
3. `store_exchange`: what ranks register at the store, and send each other through it.
4. `pairs`, `measure`: every pair in turn, over plain TCP.
5. `report`, `terminal`: tables of the results.
6. `slice_costs`: steps of the user's program with various numbers of virtual ranks.
"""

from cyxtrain.doctor.examine import examine

__all__ = ["examine"]
