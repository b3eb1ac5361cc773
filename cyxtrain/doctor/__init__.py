"""`cyxtrain doctor`: check this machine, or the network between ranks, without joining them; no training.

1. `examine`: one process, or ranks that find each other; the exit code.
2. `local_checks`, `machine_facts`: what a process finds on its machine.
3. `store_exchange`: ranks register at the store.
4. `pairs`, `measure`: every pair in turn, over plain TCP.
5. `findings`, `report`, `terminal`: the results and their tables.
"""

from cyxtrain.doctor.examine import examine

__all__ = ["examine"]
