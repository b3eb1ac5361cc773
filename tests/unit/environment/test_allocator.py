"""What a step frees stays with the process while it trains, and goes back to the kernel afterwards (glibc)."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import textwrap

import pytest

from cyxtrain.environment import allocator

pytestmark = pytest.mark.skipif(allocator._libc is None, reason="only glibc can be told")


def run(program: str) -> list[float]:
    """What a program prints, run in its own process: settings of memory are a process's."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    found: list[float] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.nightly
def test_steps_do_not_ask_the_kernel_for_memory_again():
    """A convnet frees 9 MiB in each step. Given back, they came as 200 to 600 faults a step."""
    [faults] = run("""
        import resource
        import torch
        from torch import nn
        import cyxtrain as cx

        class Faults(cx.callbacks.Callback):
            at = []

            def on_train_batch_end(self, batch, logs=None):
                self.at.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

        torch.set_num_threads(1)
        convolutions = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for before, after in ((1, 8), (8, 16))
        ]
        model = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *convolutions, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))
        rows = torch.rand(64 * 120, 784)
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "sgd", callbacks=[Faults()])
        trainer.fit(rows, torch.randint(10, (len(rows),)), epochs=1, batch_size=64, verbose=False)
        print([(Faults.at[-1] - Faults.at[60]) / (len(Faults.at) - 61)])
    """)
    assert faults < 70


@pytest.mark.nightly
def test_what_is_free_goes_back_when_training_is_over():
    before, kept, after = run("""
        import mmap
        import torch
        from cyxtrain.environment.allocator import freed_memory_kept

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE / 2**20

        torch.ones(1)
        found = [resident()]
        with freed_memory_kept():
            pieces = [torch.ones(1 << 20) for _ in range(64)]  # 4 MiB each
            del pieces
            found.append(resident())
        print([*found, resident()])
    """)
    assert kept > before + 200
    assert after < before + 50


def test_another_c_library_is_left_alone(monkeypatch):
    class Other:
        """As musl's: there is no gnu_get_libc_version."""

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Other())
    assert allocator._find_libc() is None
    monkeypatch.setattr(allocator, "_libc", None)
    with allocator.freed_memory_kept():
        pass
