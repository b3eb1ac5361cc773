"""Find what is wrong with a machine, or between machines, also where joining fails. No training.

1. `examine`: one process, or ranks that find each other; the exit code.
2. `machine_facts`, `local_checks`, `transports`: what a process finds where it runs.
3. `store_exchange`: ranks announce themselves at the store.
4. `pair_schedule`, `pairs`, `measure`: every pair in turn, over plain TCP.
5. `findings`, `report`: the results, and how people read them.
"""

from cyxtrain.doctor.examine import examine

__all__ = ["examine"]
