"""Trains GPT-2 (124 million parameters) and ResNet-50 by `fit`, by a plain loop and by a loop over PyTorch's DDP.

    python benchmarks/gpu_vs_loop.py                                             # one GPU, all models and precisions
    python -m cyxtrain launch -n 4 -- python benchmarks/gpu_vs_loop.py           # on four
    python benchmarks/gpu_vs_loop.py --models gpt2 --precisions bf16 --compiled both --json results.json
    python benchmarks/gpu_vs_loop.py --tiny                                      # whether it runs, in seconds, on CPUs

The loops are written as somebody does who knows PyTorch: a fused optimizer, pinned rows whose copies do not block, and
the next rows fetched while the GPU computes. The three ways take turns, in one process on each rank; a ratio is the
median of ratios of neighbours in time, above 1 where `fit` is faster. Rows are random: this is about time alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_models import TINY, WORKS, Work
from launches import machine, paired_ratio, take_turns
from text_tables import Table
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.environment import accelerator
from cyxtrain.progress.flops import flops_of_step, peak_flops

WAYS = ("fit", "loop", "ddp")
PRECISIONS = ("float32", "tf32", "bf16")


class StepTimer:
    """Measures the steps after the first ones, when the device has done them."""

    def __init__(self, device: torch.device, warm: int) -> None:
        self._device, self._warm = device, warm
        self._began = self.seconds = 0.0

    def step_begins(self, step: int) -> None:
        """Called before each step, from 0."""
        if step == self._warm:
            self._began = self._now()

    def end(self) -> None:
        """Called after the last one."""
        self.seconds = self._now() - self._began

    def _now(self) -> float:
        if accelerator.is_accelerator(self._device):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class Timed(cx.callbacks.Callback):
    """Lets a clock see the steps of `fit`."""

    def __init__(self, clock: StepTimer, steps: int) -> None:
        super().__init__()
        self._clock, self._steps = clock, steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tells the clock."""
        self._clock.step_begins(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells the clock, after the last one."""
        if batch == self._steps - 1:
            self._clock.end()


# --- the three ways ---------------------------------------------------------------------------------------------------


def by_fit(work: Work, device: torch.device, precision: str, compiled: bool, steps: int, clock: StepTimer) -> None:
    """Trains as a user of cyxtrain does."""
    inputs, targets = work.rows(_row_count(work, steps) * cx.get_world_size())
    model = work.make()
    loss = "cross_entropy" if targets is not None else None
    trainer = cx.DistributedTrainer(model, loss, work.optimizer(model.parameters()), device=device)
    settings = {"bf16": {"precision": "bf16"}, "tf32": {"float32_precision": "high"}}.get(precision, {})
    trainer.fit(
        *((inputs,) if targets is None else (inputs, targets)),
        epochs=1,
        steps_per_epoch=steps,
        batch_size=work.batch_size,
        compile=compiled,
        callbacks=[Timed(clock, steps)],
        verbose=False,
        check_replicas_every_n_steps=0,
        **settings,
    )


def by_loop(
    work: Work, device: torch.device, precision: str, compiled: bool, steps: int, clock: StepTimer, *, ddp: bool = False
) -> None:
    """Trains as a user of PyTorch does who knows it well."""
    inputs, targets = work.rows(_row_count(work, steps))
    model = work.make().to(device)
    optimizer = work.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["fused"] = True
    trained: nn.Module = model
    if ddp:
        ids = [device.index] if accelerator.is_accelerator(device) else None
        trained = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if compiled:
        trained = torch.compile(trained)  # type: ignore[assignment]
    with _float32_products("high" if precision == "tf32" else "highest"):
        batches = _batches(inputs, targets, work.batch_size, device)
        rows = next(batches)
        for step in range(steps):
            clock.step_begins(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = _loss(trained, *rows)
            loss.backward()
            rows = next(batches)  # while the device computes
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        clock.end()


def _loss(model: nn.Module, inputs: Any, targets: Tensor | None) -> Tensor:
    if targets is None:
        loss: Tensor = model(**inputs)
        return loss
    return nn.functional.cross_entropy(model(inputs), targets)


def _batches(
    inputs: Any, targets: Tensor | None, size: int, device: torch.device
) -> Iterator[tuple[Any, Tensor | None]]:
    """Yields rows in a random order, again and again, on the device; their copies do not block."""
    is_ahead = accelerator.is_accelerator(device)

    def move(tensor: Tensor, chosen: Tensor) -> Tensor:
        rows = tensor.index_select(0, chosen)
        return (rows.pin_memory() if is_ahead else rows).to(device, non_blocking=True)

    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    while True:
        for chosen in torch.randperm(count)[: count // size * size].split(size):
            if isinstance(inputs, dict):
                yield {name: move(each, chosen) for name, each in inputs.items()}, None
            else:
                yield move(inputs, chosen), None if targets is None else move(targets, chosen)


@contextlib.contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _row_count(work: Work, steps: int) -> int:
    """Returns for how many rows there is memory: the data are gone through again."""
    return work.batch_size * min(steps, 16)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(way: str, work: Work, device: torch.device, precision: str, compiled: bool, steps: int, warm: int) -> Any:
    """Returns seconds per step and bytes at most on this rank; the slowest rank's seconds."""
    gc.collect()
    accelerator.reset_peak_memory(device)
    torch.manual_seed(0)
    clock = StepTimer(device, warm)
    if way == "fit":
        by_fit(work, device, precision, compiled, steps + warm, clock)
    else:
        by_loop(work, device, precision, compiled, steps + warm, clock, ddp=way == "ddp")
    seconds = torch.tensor([clock.seconds / steps], dtype=torch.float64, device=device)
    cx.all_reduce(seconds, cx.ReduceOp.MAX)
    return {"seconds": float(seconds), "memory": accelerator.peak_memory(device)}


def compare(name: str, work: Work, device: torch.device, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all ways with one model; returns a row for each way, precision, and whether it was compiled."""
    found, flops, ranks = [], flops_of(work, device), cx.get_world_size()
    compiled_or_not = {"no": [False], "yes": [True], "both": [False, True]}[given.compiled]
    for precision, compiled in itertools.product(given.precisions, compiled_or_not):
        settings = {"precision": precision, "compiled": compiled, "steps": given.steps, "warm": given.warm}
        run = functools.partial(measure, work=work, device=device, **settings)
        taken = take_turns(WAYS, given.rounds, run)
        times = {way: [each["seconds"] for each in taken[way]] for way in WAYS}
        with _float32_products("high" if precision == "tf32" else "highest"):
            peak = peak_flops(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        for way in WAYS:
            rate = ranks * work.batch_size / statistics.median(times[way])
            row = {"model": name, "precision": precision, "compiled": compiled, "way": way, "ranks": ranks}
            found.append(row)
            row |= {"seconds_per_step": times[way], "samples_per_second": rate}
            row["tokens_per_second"] = work.tokens * rate or None
            row["mfu"] = flops / statistics.median(times[way]) / peak if peak else None
            row["peak_memory_bytes"] = max((each["memory"] or 0 for each in taken[way]), default=0) or None
            row["fit_times_faster"] = paired_ratio(times[way], times["fit"])
    return found


def flops_of(work: Work, device: torch.device) -> int:
    """Returns the operations of one rank's step, forward and backward."""
    inputs, targets = work.rows(work.batch_size)
    model = work.make().to(device)
    batch = next(_batches(inputs, targets, work.batch_size, device))
    return flops_of_step(lambda: _loss(model, *batch).backward())


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    columns = ["model", "precision", "way", "ms per step", "samples/s", "tokens/s", "MFU", "peak GiB", "fit is faster"]
    table = Table(title, columns, names=3)
    for row in rows:
        tokens, mfu, memory = (row[name] for name in ("tokens_per_second", "mfu", "peak_memory_bytes"))
        table.add(
            [
                *(row["model"], row["precision"] + (" compiled" if row["compiled"] else ""), row["way"]),
                *(f"{1000 * statistics.median(row['seconds_per_step']):.2f}", f"{row['samples_per_second']:,.0f}"),
                *(f"{tokens:,.0f}" if tokens else "", f"{mfu:.1%}" if mfu else ""),
                *(f"{memory / 2**30:.2f}" if memory else "", f"{row['fit_times_faster']:.3f} times"),
            ]
        )
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--compiled", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--batch-size", type=int, help="rows of a step on each rank; 8 for GPT-2, 64 for ResNet-50")
    parser.add_argument("--steps", type=int, default=30, help="steps that are measured, in each turn")
    parser.add_argument("--warm", type=int, default=10, help="steps before those")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, in seconds on CPUs")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.warm, given.rounds = 2, 1, 1
    with cx.init():
        found = accelerator.visible()
        index = cx.get_local_rank() % max(accelerator.count(), 1)
        device = torch.device("cpu") if found is None else torch.device(found.type, index)
        rows = []
        for name in given.models:
            work = (TINY if given.tiny else WORKS)[name]
            if given.batch_size:
                work = type(work)(work.make, work.optimizer, work.rows, given.batch_size, work.tokens)
            rows += compare(name, work, device, given)
        if cx.is_master():
            where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            show(rows, f"{where}, {cx.get_world_size()} ranks, PyTorch {torch.__version__}, {given.rounds} rounds")
            if given.json:
                results = {"machine": machine(), "device": where, "rows": rows}
                given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
