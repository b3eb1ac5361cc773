"""What is wrong with a machine, or between machines, told also where joining does not work.

1. `examining`: alone, or ranks that meet; the exit code.
2. `machine`, `transports`: what a process finds where it runs.
3. `meeting`: ranks that say where they are, over the store.
4. `schedule`, `pairs`, `measuring`: every pair, one after the other, over plain TCP.
5. `findings`, `report`: what was found, and how people read it.
"""

from cyxtrain.launch.doctor.examining import examine

__all__ = ["examine"]
