"""The optimizer steps by PyTorch's fused kernel where it can: as fast as PyTorch can, and handed back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fitting import fingerprint, flat, make_model, make_rows, one_process, run_world
from torch import nn

import cyxtrain as cx
from cyxtrain.optim.optimizers import can_fuse, fused

pytestmark = pytest.mark.usefixtures("rank_server")
FUSABLE = {
    "adam": torch.optim.Adam,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
}


class StepRecorder(cx.callbacks.Callback):
    """Notes how the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: set[Any] = set()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.ways |= {group["fused"] for group in self.trainer.optimizer.param_groups}


def fit(name: str, wanted: Any = "auto", dtype: str = "float32") -> dict[str, Any]:
    model, watch = make_model(dtype), StepRecorder()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), FUSABLE[name](model.parameters()), callbacks=[watch])
    rows = make_rows(40)
    trainer.fit(*rows, epochs=2, effective_batch_size=12, fused_optimizer=wanted, verbose=False)
    trainer.fit(*rows, epochs=1, effective_batch_size=12, fused_optimizer=wanted, verbose=False)
    return {
        "parameters": flat(model.parameters()),
        "ways": watch.ways,
        "after": {group["fused"] for group in trainer.optimizer.param_groups},
    }


def fit_all(wanted: Any) -> dict[str, dict[str, Any]]:
    return {name: fit(name, wanted) for name in FUSABLE}


@pytest.mark.nightly
def test_every_optimizer_that_can_is_fused_and_does_the_same_but_for_rounding():
    with one_process():
        as_built, found = fit_all(False), fit_all("auto")
    for name in FUSABLE:
        assert as_built[name]["ways"] == {None}
        assert found[name]["ways"] == {True}
        assert found[name]["after"] == {None}  # handed back as it was
        assert float(abs(found[name]["parameters"] - as_built[name]["parameters"]).max()) < 1e-5
    for rank in run_world(2, fit_all, "auto"):
        for name in FUSABLE:
            assert float(abs(rank[name]["parameters"] - found[name]["parameters"]).max()) < 1e-5


def test_what_the_user_has_decided_stays_so():
    model = make_model()
    parameters = list(model.parameters())
    for optimizer in (
        torch.optim.Adam(parameters, foreach=True),
        torch.optim.Adam(parameters, fused=False),
        torch.optim.Adam(parameters, lr=torch.tensor(1e-3)),
        torch.optim.RMSprop(parameters),
        type("Own", (torch.optim.Adam,), {})(parameters),
    ):
        assert not can_fuse(optimizer, "auto")
        with pytest.raises(cx.ConfigError, match=r"fused_optimizer=True: .*(was built with|no fused|a tensor)"):
            can_fuse(optimizer, True)
    assert can_fuse(torch.optim.SGD(parameters, 0.1), True)
    assert not can_fuse(torch.optim.SGD(parameters, 0.1), False)
    assert not can_fuse(torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 0.1), "auto")


def test_state_of_any_kind_is_taken_over_and_handed_back():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    with fused(optimizer):
        model(make_rows(4)[0]).sum().backward()
        optimizer.step()
    optimizer.step()
    for state in optimizer.state.values():
        assert (state["step"].item(), state["step"].dtype, state["step"].device.type) == (2.0, torch.float32, "cpu")


def resume(folder: str, first: Any, second: Any) -> str:
    """Fits two epochs in one go, or goes on after the first one from its checkpoint."""
    for epochs, wanted in ((1, first), (2, second)):
        model = make_model()
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
        config = cx.DistributedTrainingConfig(
            epochs=epochs,
            fused_optimizer=wanted,
            checkpoint_dir=folder,
            checkpoint_every_n_epochs=1,
            verbose=False,
        )
        trainer.fit(*make_rows(40), config, resume="auto")
    assert {group["fused"] for group in trainer.optimizer.param_groups} == {None}
    return fingerprint(model)


def test_a_checkpoint_does_not_say_how_the_optimizer_steps(tmp_path):
    with one_process():
        whole = make_model()
        trainer = cx.DistributedTrainer(whole, nn.CrossEntropyLoss(), torch.optim.Adam(whole.parameters()))
        trainer.fit(*make_rows(40), epochs=2, verbose=False)
        assert resume(f"{tmp_path}/same", "auto", "auto") == fingerprint(whole)
        with pytest.warns(UserWarning, match="the optimizer's kernel was fused and is as it was built"):
            resume(f"{tmp_path}/other", "auto", False)


def test_the_header_says_so(capsys):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "adam")
        trainer.fit(*make_rows(8), epochs=1)
        assert "by PyTorch's fused kernel" in capsys.readouterr().out
        trainer.fit(*make_rows(8), epochs=1, fused_optimizer=False)
        assert "fused" not in capsys.readouterr().out


def test_16_bits_on_cpus_are_not_fused():
    """PyTorch's fused SGD takes a tenth of the step there."""
    for dtype in (torch.bfloat16, torch.float16):
        model = nn.Linear(4, 3).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert not can_fuse(optimizer, "auto")
        with pytest.raises(cx.ConfigError, match=r"fused_optimizer=True: .* on CPUs PyTorch's kernel is wrong there"):
            can_fuse(optimizer, True)
    assert can_fuse(torch.optim.SGD(nn.Linear(4, 3).double().parameters(), 0.1), "auto")


class OwnNorm(nn.Module):
    """As a user's own RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def test_adamw_by_name_decays_neither_norms_nor_biases_and_the_header_says_so(capsys):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), OwnNorm(), nn.Linear(8, 3))

    def fit(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer)
        trainer.fit(*make_rows(20), epochs=1)
        return trainer.optimizer

    words = "AdamW, by PyTorch's fused kernel, no weight decay on norms and biases"
    with one_process():
        for name in ("adamw", "AdamW"):
            model = make()
            decayed, spared = fit(model, name).param_groups
            assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
            assert {id(each) for each in decayed["params"]} == {id(model[0].weight), id(model[3].weight)}
            assert len(spared["params"]) == 5
            assert words in " ".join(capsys.readouterr().out.split())
        assert len(fit(make(), torch.optim.AdamW).param_groups) == 1  # as its user gives it
        assert len(fit(make(), "adam").param_groups) == 1
        assert "no weight decay" not in capsys.readouterr().out
    values = {
        "model": {"name": "mlp", "inputs": 64, "outputs": 10},
        "data": "digits",
        "optimizer": {"name": "adamw", "weight_decay": 0.1},
    }
    groups = cx.Experiment(values).trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
