"""Modules load what they saved by rules of their own: other names, other shapes, values that are no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from markers import by_night
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune

import cyxtrain as cx

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min", "ignore:torch.ao", "ignore:.*weight_norm")
X = torch.linspace(-2, 3, 24).reshape(4, 6)


class Cached(nn.Module):
    """Makes a buffer for the longest input so far, and another one that it registers in its first forward."""

    def __init__(self, length: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("table", torch.ones(length))
        self.register_buffer("first", None)
        self.first: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        if self.first is None:
            self.first = x[0].clone()
        out: Tensor = self.layer(x * self.table + self.first)
        return out


class Renamed(nn.Module):
    """Had another name for a weight once, and has a counter that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.calls = 0
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "layer.")] = state.pop(name)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) + self.calls
        return out


def quantised(qconfig: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    model.qconfig = quantization.get_default_qat_qconfig(qconfig)  # type: ignore[assignment]
    prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def pruned() -> nn.Module:
    layer = nn.Linear(6, 3)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


MODULES = {
    "grown": Cached,
    "hooks and extra state": Renamed,
    "observers per channel": lambda: quantised("fbgemm"),
    "observers per tensor": lambda: quantised("qnnpack"),
    "parametrised": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(6, 3))),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(6, 3)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 3)),
    "pruned": pruned,
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d()),
}


@pytest.mark.parametrize("compiled", [False, by_night(True)])
@pytest.mark.parametrize("kind", MODULES)
def test_what_was_saved_after_a_forward_is_loaded_before_one(kind, compiled, tmp_path: Path):
    model = MODULES[kind]()
    model(X)
    model(2 * X)
    cx.save_weights(model, tmp_path / "weights.safetensors")
    new = MODULES[kind]()
    cx.load_weights(torch.compile(new) if compiled else new, tmp_path / "weights.safetensors")
    ours, theirs = model.state_dict(), new.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name], name
    assert torch.equal(model.eval()(X), new.eval()(X))


def test_old_names_are_translated_by_the_modules_own_hook(tmp_path: Path):
    old = nn.Sequential()
    old.add_module("old", nn.Linear(6, 3))
    state = {f"part.{name}": value for name, value in old.state_dict().items()}
    holder = nn.Module()
    holder.part, holder.other = Renamed(), nn.Linear(2, 2)
    state |= {f"other.{name}": value for name, value in holder.other.state_dict().items()}
    import safetensors.torch

    safetensors.torch.save_file(state, tmp_path / "old.safetensors")
    with pytest.raises(cx.CheckpointError, match=r"part\._extra_state"):  # by PyTorch: the hook does not make one
        cx.load_weights(holder, tmp_path / "old.safetensors")
    assert torch.equal(holder.part.layer.weight, old.old.weight)


def test_another_size_of_a_layer_or_a_norm_is_refused_before_anything_is_copied(tmp_path: Path):
    cx.save_weights(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False)), tmp_path / "w.safetensors")
    for other in (nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(3, affine=False, track_running_stats=False)):
        new = nn.Sequential(nn.Linear(6, 3), other)
        before = new[0].weight.clone()
        with pytest.raises(cx.CheckpointError, match=r"1.running_mean"):
            cx.load_weights(new, tmp_path / "w.safetensors")
        assert torch.equal(new[0].weight, before)
