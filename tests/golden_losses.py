"""Compare the losses and weights of two checkouts bit by bit: `python tests/golden_losses.py OLD NEW`.

A refactoring must not change a bit. Fits on 1, 2 and 3 ranks, also over TCP and Gloo, and all_reduces
(`golden_fits.py`) print hexadecimal losses and hashes of weights; the exit code is 1 if a line differs. It takes two
minutes for each checkout.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GLOO = {"DISTRIBUTED_BACKEND": "gloo"}
TCP = {"CYXTRAIN_TRANSPORT": "tcp"}
WORLDS: dict[str, tuple[int, dict[str, str]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "2 tcp": (2, TCP),
    "2 gloo": (2, GLOO),
    "3": (3, {}),
}
"""Number of ranks, and what differs from the usual environment."""

PROGRAM = Path(__file__).with_name("golden_fits.py")


def golden(root: Path) -> list[str]:
    """Return what the fits of a checkout print."""
    lines = []
    for name, (count, differing) in WORLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CYXTRAIN_SECRET": "x", "GOLDEN_FOLDER": folder}
            own["CYXTRAIN_TRANSPORT"] = "auto"  # whatever this shell has set
            command = [sys.executable, "-m", "cyxtrain", "launch", "-n", str(count), "--", sys.executable, str(PROGRAM)]
            variables = {**os.environ, **own, **differing}
            ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
        if ended.returncode:
            sys.exit(f"{root}, ranks {name}: {ended.stdout}{ended.stderr}")
        lines += [f"{name}: {line.removeprefix('[rank 0] ')}" for line in ended.stdout.splitlines()]
    return lines


def main() -> None:
    old, new = (golden(Path(each).resolve()) for each in sys.argv[1:3])
    found = [*difflib.unified_diff(old, new, sys.argv[1], sys.argv[2], lineterm="")]
    print(*found or [f"{len(old)} lines are the same, bit for bit"], sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
