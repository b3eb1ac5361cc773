"""What ranks do in test_placement.py, on a stand-in for a GPU."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fitting import make_model, make_rows
from stand_in import fakegpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.data.rng import generators_as_json, seed_generators, set_generators
from cyxtrain.optim.optimizers import place_state
from cyxtrain.parallel.consistency.replicas import check_replicas
from cyxtrain.tensors.fingerprint import fingerprints
from cyxtrain.world import runtime

GPU = fakegpu.NAME
ROWS = 40
EPOCH: dict[str, Any] = {"epochs": 1, "batch_size": 8, "verbose": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {"fused": True},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "ASGD": {},
    "Adafactor": {},
}


def adam_on(model: nn.Module, device: str, **settings: Any) -> cx.DistributedTrainer:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return cx.DistributedTrainer(model, "cross_entropy", optimizer, device=device, **settings)


def parameters_of(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


# --- the optimizer's state follows the model ------------------------------------------------------------------------


def step_by_hand(trainer: cx.DistributedTrainer, device: str) -> None:
    for _ in range(2):
        inputs, targets = (each.to(device) for each in make_rows(ROWS))
        nn.functional.cross_entropy(trainer.model(inputs), targets).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def there_and_back(name: str, device: str, path: str) -> list[float]:
    """Trains by steps by hand, by fit, and from a checkpoint; on a device and on the CPU in turns."""

    def trainer_on(device: str) -> cx.DistributedTrainer:
        return cx.DistributedTrainer(model, "cross_entropy", optimizer, device=device)

    model = make_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
    trainer = trainer_on(device)
    step_by_hand(trainer, "cpu")
    trainer.fit(*make_rows(ROWS), **EPOCH)
    assert next(model.parameters()).device.type == device
    step_by_hand(trainer, device)
    trainer.save_checkpoint(path)
    trainer_on("cpu").fit(*make_rows(ROWS), **EPOCH)
    step_by_hand(trainer, "cpu")
    model = make_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
    trainer = trainer_on(device)
    trainer.load_checkpoint(path)
    trainer.evaluate(*make_rows(ROWS))  # moves the model, too
    step_by_hand(trainer, device)
    trainer.fit(*make_rows(ROWS), **EPOCH)
    return parameters_of(model)


def every_optimizer(names: list[str], path: str, gpu: str) -> dict[str, list[list[float]]]:
    return {name: [there_and_back(name, device, path) for device in ("cpu", gpu)] for name in names}


def state_on_the_device(gpu: str, *, capturable: bool) -> list[list[str]]:
    """Names of an optimizer's state that is on the device, after its model has gone there, and after it came back."""
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    state["own"] = [torch.ones(1), {"deep": torch.ones(1)}]
    optimizer.param_groups[0]["capturable"] = capturable
    found = []
    for device in (gpu, "cpu"):
        model.to(device)
        place_state(optimizer)
        parts = {**state, "own": state["own"][0], "deep": state["own"][1]["deep"]}
        found.append(sorted(name for name, each in parts.items() if each.device.type == gpu))
    return found


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Parameters(cx.callbacks.Callback):
    """Keeps what the parameters are after each step; counts what stops the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            fakegpu.start_counting()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(parameters_of(self.trainer.model))

    def on_train_end(self, logs: Any = None) -> None:
        fakegpu.stop_counting()


def checkpoints(folder: str, gpu: str) -> list[Any]:
    """Returns whether each checkpoint holds what was there at its step, and the stops that making them took."""
    seen = Parameters()
    settings: dict[str, Any] = {**EPOCH, "checkpoint_dir": folder, "checkpoint_every_n_steps": 1, "keep_last": 0}
    model = make_model()
    adam_on(model, gpu, callbacks=[seen]).fit(*make_rows(ROWS), **settings)
    names = [name for name, _ in model.named_parameters()]
    right = []
    for number, values in enumerate(seen.seen):
        saved = read_checkpoint(next(Path(folder).glob(f"*-{number + 1:08d}.ckpt"))).model
        right.append([value for name in names for value in saved[name].flatten().tolist()] == values)
    stops = [f"{kind} {place}" for (kind, place), _ in fakegpu.stops.items() if "checkpoint/" in place]
    return [right, [each for each in stops if "SYNC" in each and "event" not in each]]


# --- generators and the default device ------------------------------------------------------------------------------


def generators(gpu: str) -> list[Any]:
    """Returns how often the device's generator was seeded, and whether it was given the state that it had had."""
    device, seeds, states = torch.device(gpu), list[int](), list[Tensor]()
    module: Any = torch.get_device_module(device)
    own = module.manual_seed, module.set_rng_state
    module.manual_seed, module.set_rng_state = seeds.append, states.append
    seed_generators(1, 2, 3, 0, device)
    had = module.get_rng_state()
    saved = generators_as_json(device)
    torch.rand(3)  # the stand-in's generator is the CPU's
    set_generators(saved, device)
    module.manual_seed, module.set_rng_state = own
    return [len(seeds), [torch.equal(state, had) for state in states]]


def fit_by_default_on(device: str) -> list[float]:
    """Fits whatever a default device might spoil."""
    inputs, targets = make_rows(ROWS)
    rows, held_out = (inputs.to(device), targets.to(device)), make_rows(20)  # before the default: PyTorch draws there
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    metrics = {"own": lambda output, _: (output.sum(), 2.0)}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (rows, {"batch_size": 8, "class_weight": {0: 1, 1: 2, 2: 1}}),
        ((inputs, targets), {"batch_size": 8, "precision": "fp16", "validation_data": held_out}),
        ([loader], {"validation_data": loader}),
    ]
    trainers = [adam_on(make_model().to(device), device, metrics=metrics) for _ in cases]
    found: list[float] = []
    torch.set_default_device(device)
    for trainer, (data, settings) in zip(trainers, cases, strict=True):
        found += trainer.fit(*data, epochs=1, verbose=False, **settings).train_losses
        found += [trainer.evaluate(*rows).loss, float(trainer.predict(rows[0]).sum())]
    torch.set_default_device(None)
    return found


# --- one process with all of it -------------------------------------------------------------------------------------


def all_alone(folder: str, optimizers: list[str], gpu: str = GPU) -> dict[str, Any]:
    with cx.init(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "optimizers": every_optimizer(optimizers, f"{folder}/one.ckpt", gpu),
            "state": [state_on_the_device(gpu, capturable=capturable) for capturable in (False, True)],
            "checkpoints": checkpoints(f"{folder}/all", gpu),
            "generators": generators(gpu),
            "default device": [fit_by_default_on(device) for device in ("cpu", gpu)],
        }


# --- ranks ----------------------------------------------------------------------------------------------------------


def tensors_on(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "large": torch.randn(1_100_000, generator=generator),
        "turned": torch.randn(30, 20, generator=generator).t(),
        "half": torch.randn(11, generator=generator).bfloat16(),
        "small": torch.arange(7, dtype=torch.uint8),
        "single": torch.ones(()),
        "none": torch.ones(0),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def differing(flips: dict[int, dict[str, int]], devices: list[str]) -> str:
    """Changes elements on some ranks; returns what the comparison says, "" where nothing."""
    tensors = tensors_on(devices[cx.get_rank()])
    for name, place in flips.get(cx.get_rank(), {}).items():
        tensors[name].t().view(-1)[place] += 1
    try:
        check_replicas([*tensors.items()], runtime.current())
    except cx.ReplicasDifferError as error:
        return str(error).split(":")[0]
    return ""


def stops_of_hashes(gpu: str) -> list[str]:
    tensors = [*tensors_on(gpu).values()]
    fingerprints(tensors)  # the table of weights is copied once
    with fakegpu.counting() as stops:
        fingerprints(tensors)
    return [kind for (kind, _), count in stops.items() for _ in range(count) if "SYNC" in kind]


@contextlib.contextmanager
def sending() -> Iterator[list[torch.dtype]]:
    """Gives the types of what is broadcast within."""
    types: list[torch.dtype] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, *given: Any, **more: Any) -> Any:
        types.append(tensor.dtype)
        return broadcast(tensor, *given, **more)

    dist.broadcast = noted
    yield types
    dist.broadcast = broadcast


def shared_buffers(device: str) -> list[str]:
    """Returns buffers that are not rank 0's on this rank after a model was wrapped, and types that NCCL cannot send."""
    model = nn.Linear(2, 2).to(device)
    numbers = torch.arange(6).view(2, 3) + 10 * runtime.get_rank()
    types = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float16)
    kinds = {str(dtype).removeprefix("torch."): (numbers % 7).to(dtype) for dtype in types}
    expected = {name: ((torch.arange(6) % 7).view(2, 3)).to(tensor.dtype) for name, tensor in kinds.items()}
    for name, tensor in kinds.items():
        model.register_buffer(name, tensor.to(device))
    with sending() as sent:
        cx.DistributedDataParallel(model)
    wrong = [name for name, each in expected.items() if not torch.equal(model.get_buffer(name).cpu(), each)]
    return wrong + [str(dtype) for dtype in sent if dtype is not torch.uint8]


def gathered(device: str) -> list[int]:
    rows = torch.arange(2, dtype=torch.int16, device=device) + 300 * cx.get_rank()
    found: list[int] = cx.all_gather_with_grad(rows).tolist()
    return found


def all_in_world(gpu: str = GPU) -> dict[str, Any]:
    with cx.init():
        ddp_config = cx.DDPConfig(compression="powersgd")
        losses = []
        for device in ("cpu", gpu):
            rows, trainer = make_rows(ROWS), adam_on(make_model().to(device), device, ddp_config=ddp_config)
            torch.set_default_device(device)
            losses.append(trainer.fit(*rows, **EPOCH, check_replicas_every_n_steps=1).train_losses)
            torch.set_default_device(None)
        return {
            "equal": differing({}, [gpu, gpu]),
            "flipped": differing({1: {"large": 1_050_000, "small": 3}}, [gpu, gpu]),
            "mixed": differing({}, ["cpu", gpu]),
            "mixed and flipped": differing({0: {"turned": 5}}, ["cpu", gpu]),
            "stops": stops_of_hashes(gpu),
            "gathered": gathered(gpu),
            "buffers": [shared_buffers(device) for device in ("cpu", gpu)],
            "losses": losses,
        }


# --- a notebook's workers -------------------------------------------------------------------------------------------


def fit_in_turns(turns: list[tuple[str, int]]) -> tuple[list[float], list[str]]:
    """Fits one model on devices, by so many processes; returns the losses, and where state was after the first two."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[float] = []
    devices: list[str] = []
    for device, count in turns:
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, device=device)
        settings: Any = {"epochs": 1, "effective_batch_size": 8, "verbose": False, "num_processes": count}
        losses += trainer.fit(*make_rows(ROWS), **settings).train_losses
        devices += {each.device.type for state in optimizer.state.values() for each in state.values()}
    return losses, devices[:2]


def main() -> None:
    """A notebook whose workers compute on the device: the model stays where it is there."""
    turns = [(GPU, 2), (GPU, 2), (GPU, 1), (GPU, 2), (GPU, 1), ("cpu", 1)]
    print(json.dumps([fit_in_turns(turns), fit_in_turns([("cpu", 1)] * len(turns))]))
