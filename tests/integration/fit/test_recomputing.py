"""Gradient checkpointing changes no bit, keeps less, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_model import Block, make_deep
from fitting import fingerprint, make_rows, one_process
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.training.model.compile import layers_of, recomputed

pytestmark = pytest.mark.usefixtures("rank_server")


def fit(recompute: bool, settings: dict[str, Any]) -> Any:
    model = make_deep()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    if recompute:
        trainer.enable_gradient_checkpointing()
    trainer.fit(*make_rows(40), epochs=2, effective_batch_size=20, verbose=False, **settings)
    assert not any("forward" in module.__dict__ for module in model.modules())
    return fingerprint(model), sum(block.runs for block in model.blocks)


@pytest.mark.parametrize("settings", [by_night({}), by_night({"precision": "bf16"}), {"accumulation_steps": 2}])
def test_a_model_that_calculates_anew_has_the_same_bits(settings):
    with one_process():
        bits, runs = fit(False, settings)
        found, more = fit(True, settings)
    assert found == bits
    steps = 4 * settings.get("accumulation_steps", 1)
    assert more == runs + 4 * steps  # each block once more in each backward


def kept_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """What autograd keeps of a forward."""
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(sizes)


def test_less_is_kept():
    model, inputs = make_deep(), torch.randn(1000, 4)
    everything = kept_bytes(model, inputs)
    with recomputed(layers_of(model, [])):
        assert kept_bytes(model, inputs) < everything / 3


def test_layers_are_found_by_themselves_by_class_or_by_name():
    model = make_deep()
    assert layers_of(model, []) == list(model.blocks)
    assert layers_of(model, [nn.Linear]) == [model.first, model.last, *(block.linear for block in model.blocks)]
    assert layers_of(model, ["blocks.1", "last"]) == [model.last, model.blocks[1]]
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert layers_of(plain, []) == [plain[0], plain[2]]
    for wanted, words in (
        (["blocks.9"], "no layers named blocks.9"),
        ([nn.Conv2d], "no such layers"),
        ([Block, nn.Linear], "parts of others"),
    ):
        with pytest.raises(cx.ConfigError, match=words):
            layers_of(model, wanted)


def test_a_forward_that_the_user_has_replaced_is_handed_back():
    layer = nn.Linear(2, 2)
    own = layer.forward = lambda x: x * 2
    with pytest.raises(KeyError), recomputed([layer]):
        raise KeyError
    assert layer.forward is own
