"""Compare the losses and weights of two checkouts bit by bit: `python tests/golden_losses.py OLD NEW`.

A refactoring must not change a bit. Fits on 1, 2 and 3 ranks, and all_reduces, print hexadecimal losses and hashes of
weights; the exit code is 1 if a line differs. It takes half a minute for each checkout.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

WORLDS = ((1, "auto"), (2, "auto"), (2, "tcp"), (3, "auto"))
"""Number of ranks, and CYXTRAIN_TRANSPORT."""

PROGRAM = """
import hashlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import cyxtrain as cx

cx.init()
lines = []

def digest(tensors):
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]

def run(name, make, loss, optimizer, inputs, targets, **settings):
    torch.manual_seed(1)
    trainer = cx.DistributedTrainer(make(), loss, optimizer)
    history = trainer.fit(inputs, targets, verbose=False, **settings)
    evaluated = [float(value).hex() for value in trainer.evaluate(inputs, targets) if value is not None]
    lines.append((name, [loss.hex() for loss in history.train_losses], evaluated, digest(trainer.model.parameters())))

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(203, 20, generator=generator), torch.randint(0, 4, (203,), generator=generator)
R = torch.randn(203, 3, generator=generator)
I, J = torch.randn(53, 3, 8, 8, generator=generator), torch.randint(0, 4, (53,), generator=generator)
mlp = lambda: nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 4))
regression = lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))
convnet = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
run("mlp", mlp, nn.CrossEntropyLoss(), "adam", X, Y, epochs=3, batch_size=32)
run("class weights", mlp, weighted, "adamw", X, Y, epochs=2, batch_size=16, clip_norm=1.0, accumulation_steps=2)
run("regression", regression, nn.MSELoss(), "sgd", X, R, epochs=3, batch_size=50, clip_value=0.1)
run("convnet", convnet, nn.CrossEntropyLoss(), "sgd", I, J, epochs=2, batch_size=8, validation_split=0.2)
for precision in ("bf16", "fp16"):
    run(precision, regression, nn.MSELoss(), "adam", X, R, epochs=2, batch_size=32, precision=precision)
run("sum", regression, nn.MSELoss(reduction="sum"), "adam", X, R, epochs=2, batch_size=32)
trainer = cx.DistributedTrainer(mlp(), nn.CrossEntropyLoss(), "adam")
torch.manual_seed(3)
history = trainer.fit(DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True), epochs=2, verbose=False)
lines.append(("loader", [loss.hex() for loss in history.train_losses]))
ddp = cx.DistributedDataParallel(regression(), cx.DDPConfig(compression="powersgd"))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for step in range(5):
    rows = slice(20 * step, 20 * step + 20)
    optimizer.zero_grad()
    loss = (ddp(X[rows]) - R[rows]).square().mean()
    loss.backward()
    optimizer.step()
lines.append(("powersgd", loss.item().hex()))
for count in (1, 7, 1000, 70_000, 400_000):
    values = torch.randn(count, generator=torch.Generator().manual_seed(cx.get_rank()))
    cx.all_reduce(values)
    lines.append((count, digest([values])))
if cx.is_master():
    print(*map(repr, lines), sep="\\n")
cx.finalize()
"""


def golden(root: Path) -> list[str]:
    """Return what the fits of a checkout print."""
    lines = []
    for count, transport in WORLDS:
        own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CYXTRAIN_TRANSPORT": transport, "CYXTRAIN_SECRET": "x"}
        command = [sys.executable, "-m", "cyxtrain", "launch", "-n", str(count), "--", sys.executable, "-c", PROGRAM]
        variables = {**os.environ, **own}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode:
            sys.exit(f"{root}, {count} ranks over {transport}: {ended.stderr}")
        lines += [f"{count} {transport} {line.removeprefix('[rank 0] ')}" for line in ended.stdout.splitlines()]
    return lines


def main() -> None:
    old, new = (golden(Path(each).resolve()) for each in sys.argv[1:3])
    found = [*difflib.unified_diff(old, new, sys.argv[1], sys.argv[2], lineterm="")]
    print(*found or [f"{len(old)} lines are the same, bit for bit"], sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
