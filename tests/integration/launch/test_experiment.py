"""Experiments: what a file says is what is trained, on any number of ranks, and what it cannot mean is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import fingerprint, one_process, run_world
from markers import nightly_where
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.callbacks import CSVLogger, EarlyStopping
from cyxtrain.models import registry

pytestmark = pytest.mark.usefixtures("rank_server")
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
MLP = {"name": "mlp", "inputs": 64, "outputs": 10}
DIGITS = {"model": MLP, "data": "digits", "loss_fn": "cross_entropy"}
QUIET = {"epochs": 1, "verbose": False}


# --- every file in configs/ -----------------------------------------------------------------------------------------

WHOLE = ["model.name=mlp", "model.inputs=64", "model.outputs=10", "loss_fn=cross_entropy"]


def tried(path: str, overrides: list[str]) -> dict[str, Any]:
    experiment = cx.Experiment.from_file(path, [*overrides, "training.fast_dev_run=true", "training.verbose=false"])
    history = experiment.fit()
    measured = experiment.evaluate()
    assert measured is not None
    return {"losses": history.train_losses, "world": history.world_size, "test": measured.loss}


@nightly_where(lambda path: path.name != "base.yaml")
@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_every_file_runs_on_one_rank_and_on_two(path):
    overrides = WHOLE if path.name == "base.yaml" else []
    for world_size in (1, 2):
        for found in run_world(world_size, tried, str(path), overrides):
            assert found["world"] == world_size
            assert len(found["losses"]) == 1
            assert np.isfinite([*found["losses"], found["test"]]).all()


# --- what is made ---------------------------------------------------------------------------------------------------


def of_the_file() -> str:
    experiment = cx.Experiment({**DIGITS, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "training": QUIET})
    experiment.fit()
    return fingerprint(experiment.trainer.model)


def by_hand() -> str:
    torch.manual_seed(cx.DistributedTrainingConfig().seed)
    model = cx.get_model("mlp")(inputs=64, outputs=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer)
    trainer.fit(*cx.datasets.load_digits()[0], **QUIET)
    return fingerprint(model)


def test_a_file_trains_what_a_program_does_to_the_bit():
    assert run_world(2, of_the_file) == run_world(2, by_hand)


def test_making_an_experiment_draws_from_no_generator_of_the_program():
    before = torch.get_rng_state()
    first, second = (cx.Experiment(DIGITS).trainer.model for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first) != fingerprint(cx.Experiment({**DIGITS, "training": {"seed": 1}}).trainer.model)


def test_each_section_makes_what_it_names():
    experiment = cx.Experiment(
        {
            **DIGITS,
            "loss_fn": {"name": "CrossEntropyLoss", "weight": [1.0] * 9 + [2.0], "label_smoothing": 0.1},
            "optimizer": {"name": "NAdam", "betas": [0.8, 0.9]},
            "scheduler": {"name": "StepLR", "step_size": 10},
            "metrics": ["f1"],
            "callbacks": ["TerminateOnNaN", {"name": "EarlyStopping", "monitor": "loss", "patience": 2}],
            "training": {"epochs": 3, "precision": "fp16", "amp": {"initial_scale": 8.0}},
            "distributed": {"timeout_ms": 1000, "compression": "bf16"},
        }
    )
    trainer = experiment.trainer
    assert isinstance(trainer.loss_fn, nn.CrossEntropyLoss)
    assert trainer.loss_fn.weight is not None
    assert trainer.loss_fn.weight[9] == 2
    assert isinstance(trainer.optimizer, torch.optim.NAdam)
    assert trainer.optimizer.defaults["betas"] == [0.8, 0.9]
    assert isinstance(trainer.scheduler, torch.optim.lr_scheduler.StepLR)
    assert isinstance(trainer.callbacks[1], EarlyStopping)
    assert trainer.ddp_config.compression == "bf16"
    assert experiment.data.test[0].shape == (360, 64)


def test_several_optimizers_have_their_modules_schedules_and_limits():
    experiment = cx.Experiment(
        {
            **DIGITS,
            "optimizers": {
                "hidden": {"name": "adamw", "lr": 0.01, "modules": "layers.1"},
                "output": {"name": "sgd", "modules": ["layers.3"]},
            },
            "schedulers": {"output": "cosine"},
            "training": {**QUIET, "clip_norm": {"hidden": 1.0}, "batch_size": 128},
        }
    )
    trainer = experiment.trainer
    assert {name: type(each).__name__ for name, each in trainer.optimizers.items()} == {
        "hidden": "AdamW",
        "output": "SGD",
    }
    assert [group["weight_decay"] for group in trainer.optimizers["hidden"].param_groups] == [0.01, 0.0]
    with one_process():
        history = experiment.fit()
    assert len(history.train_losses) == 1
    assert trainer.schedulers["hidden"] is None
    assert trainer.optimizers["output"].param_groups[0]["lr"] == pytest.approx(0.0)


def test_adam_with_keras_rate_where_nothing_is_said():
    assert cx.Experiment(DIGITS).trainer.optimizer.param_groups[0]["lr"] == 1e-3
    named = cx.Experiment({**DIGITS, "optimizer": {"name": "sgd", "momentum": 0.5}}).trainer.optimizer
    assert (named.param_groups[0]["lr"], named.param_groups[0]["momentum"]) == (1e-2, 0.5)


# --- a user's own ---------------------------------------------------------------------------------------------------

OWN = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rows = np.random.default_rng(0).random((40, 3), dtype=np.float32)
classes = (rows.sum(1) > 1.5).astype(np.int64)

def pair(size=40):
    return (rows[:size], classes[:size]), (rows, classes)

def loaders(**settings):
    data = TensorDataset(torch.from_numpy(rows), torch.from_numpy(classes))
    return {"train": DataLoader(data, 8), "validation": DataLoader(data, 8), "test": DataLoader(data, 20)}

def no_data():
    return rows

class Net(nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, 2)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def odd():
    return 3

def one():
    return rows, classes

def right(output, target):
    return (output.argmax(1) == target).float()

class Weighted(nn.Module):
    def __init__(self, parts):
        super().__init__()
        assert parts == [1, 2]
    def forward(self, output, target):
        return loss(output, target)

def decay(optimizer, total_steps, power=1.0):
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_steps, power)

def step(trainer, batch):
    result = trainer.train_step(batch)
    return {"loss": 2 * result["loss"], "half": result["loss"]}

def softened(trainer, batch):
    return trainer.model(batch[0]).softmax(1)

import cyxtrain as cx
@cx.register_model("registered")
def registered(config):
    return Net(config.model.width)

@cx.metrics.WholeSet
def count(outputs, targets):
    return len(targets)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    (tmp_path / "own_things.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("own_things", None)


def fitted(values: dict[str, Any]) -> tuple[cx.TrainingHistory, cx.Experiment]:
    experiment = cx.Experiment({"training": QUIET, **values})
    try:
        history = experiment.fit()
        assert experiment.evaluate() is not None
    finally:
        cx.finalize()
    return history, experiment


@pytest.mark.parametrize("data", [{"name": "own_things:pair", "size": 20}, "own_things:loaders"])
def test_a_users_own_model_data_and_loss_by_the_names_of_their_modules(own, data):
    values = {"model": {"name": "own_things:Net", "width": 3}, "loss_fn": "own_things:loss", "data": data}
    history, _ = fitted(values)
    assert len(history.val_losses) == (data == "own_things:loaders")


def test_models_that_are_registered_in_a_module_of_imports_and_take_the_config(own):
    values = {"imports": ["own_things"], "model": {"name": "registered", "width": 3}, "data": "own_things:loaders"}
    history, experiment = fitted(
        {
            **values,
            "loss_fn": {"name": "own_things:Weighted", "parts": [1, 2]},
            "metrics": [
                "own_things:right",
                "own_things:count",
                {"name": "cyxtrain.metrics:ConfusionMatrix", "path": None},
            ],
        }
    )
    assert history.metrics["right"]
    assert history.metrics["val_count"][0] == 40
    assert experiment.trainer.metrics["confusion_matrix"].matrix.sum() == 40


def test_steps_of_the_user_s_own_by_the_names_of_their_modules(own):
    values = {"model": "own_things:Net", "loss_fn": "own_things:loss", "data": "own_things:loaders"}
    steps = {"train_step": "own_things:step", "test_step": "own_things:step", "predict_step": "own_things:softened"}
    history, experiment = fitted({**values, **steps})
    assert history.train_losses == pytest.approx([2 * history.history["half"][0]])
    assert history.val_losses == pytest.approx([2 * history.history["val_half"][0]])
    assert experiment.trainer.predict(np.ones((2, 3), np.float32)).sum() == pytest.approx(2.0)
    cx.finalize()


@pytest.mark.parametrize(
    "scheduler", ["one_cycle", "own_things:decay", {"name": "own_things:decay", "power": 2.0}], ids=str
)
def test_a_schedule_is_told_how_many_steps_the_fit_has(own, scheduler):
    values = {"model": {"name": "own_things:Net"}, "loss_fn": "own_things:loss", "data": "own_things:pair"}
    training = {**QUIET, "epochs": 2, "batch_size": 10, "warmup_steps": 0.25, "scheduler_interval": "step"}
    _, experiment = fitted({**values, "scheduler": scheduler, "training": training})
    schedule = experiment.trainer.scheduler
    if scheduler == "one_cycle":
        assert (schedule.total_steps, schedule.rise) == (8, 0.25)
    else:
        power = 1.0 if isinstance(scheduler, str) else 2.0
        assert (schedule.total_iters, schedule.power, schedule.last_epoch) == (6, power, 6)


def test_class_weights_may_be_whole_numbers_and_names_capitals():
    experiment = cx.Experiment(
        {**DIGITS, "loss_fn": {"name": "CrossEntropyLoss", "weight": [1] * 10}, "optimizer": "SGD"}
    )
    assert experiment.trainer.loss_fn.weight.dtype is torch.float32
    assert experiment.trainer.optimizer.param_groups[0]["lr"] == 1e-2  # as DistributedTrainer(optimizer="SGD")
    assert cx.Experiment({**DIGITS, "optimizer": {"lr": 0.5}}).trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert isinstance(cx.Experiment({**DIGITS, "optimizer": None}).trainer.optimizer, torch.optim.Adam)


def test_a_loss_that_was_forgotten_is_missed():
    with pytest.raises(cx.ConfigError, match=r"loss_fn is missing: .* the forward of MLP does not take both"):
        fitted({"model": MLP, "data": "digits"})


def test_arrays_of_a_file(own):
    rows, classes = np.random.default_rng(0).random((20, 3)), np.zeros(20, np.int64)
    np.savez("rows.npz", x_train=rows, y_train=classes, x_val=rows, y_val=classes, x_test=rows[:4], y_test=classes[:4])
    history, experiment = fitted(
        {
            "model": {"name": "mlp", "inputs": 3, "outputs": 2},
            "loss_fn": "cross_entropy",
            "data": {"name": "npz", "path": "rows.npz"},
        }
    )
    assert len(history.val_losses) == 1
    assert len(experiment.data.test[0]) == 4


def test_validation_without_targets(own):
    np.savez("rows.npz", x_train=np.zeros((8, 3)), x_val=np.zeros((4, 3)), x_test=np.zeros((4, 3)))
    history, _ = fitted({"model": {"name": "vae", "inputs": 3}, "data": {"name": "npz", "path": "rows.npz"}})
    assert len(history.val_losses) == 1


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_the_experiment(own):
    _, experiment = fitted({**DIGITS, "training": {**QUIET, "checkpoint_every_n_epochs": 1}})
    again = cx.Experiment.from_checkpoint("checkpoints/epoch-0001.ckpt")
    assert again.config == experiment.config
    again.trainer.load_checkpoint("checkpoints/epoch-0001.ckpt")
    assert fingerprint(again.trainer.model) == fingerprint(experiment.trainer.model)
    cx.finalize()


def test_metadata_come_back(own):
    trainer = cx.DistributedTrainer(nn.Linear(2, 1), "mse")
    trainer.metadata.update(note="first", tokens=[1, 2])
    trainer.save_checkpoint("kept.ckpt")
    other = cx.DistributedTrainer(nn.Linear(2, 1), "mse")
    other.metadata["note"] = "mine"
    other.load_checkpoint("kept.ckpt")
    assert other.metadata == {"note": "first", "tokens": [1, 2]}
    trainer.metadata["bad"] = object()
    with pytest.raises(cx.CheckpointError, match="bad"):
        trainer.save_checkpoint("kept.ckpt")
    cx.finalize()


def test_a_checkpoint_runs_no_code_that_is_not_cyxtrains(own):
    trainer = cx.DistributedTrainer(nn.Linear(2, 1), "mse")
    trainer.save_checkpoint("plain.ckpt")
    foreign = "own_things:pair"
    sections = [
        (name, each)
        for name in ("model", "data", "loss_fn", "optimizer", "scheduler", "metrics")
        for each in (foreign, {"name": foreign})
    ]
    for number, (section, value) in enumerate([*sections, ("metrics", [foreign]), ("imports", ["own_things"])]):
        trainer.metadata["experiment"] = {**DIGITS, section: value}
        trainer.save_checkpoint(f"{number}.ckpt")
        for overrides in ([], ["training.seed=1"]):
            with pytest.raises(
                cx.ConfigError, match=r"'own_things.*' is code from outside cyxtrain, which a checkpoint"
            ):
                cx.Experiment.from_checkpoint(f"{number}.ckpt", overrides)
    with pytest.raises(cx.ConfigError, match="was not saved by an experiment"):
        cx.Experiment.from_checkpoint("plain.ckpt")
    assert "own_things" not in sys.modules
    cx.finalize()


def test_a_checkpoint_decides_nothing_but_what_is_computed(own, monkeypatch):
    monkeypatch.setenv("SECRET_WORD", "xyzzy")
    trainer = cx.DistributedTrainer(nn.Linear(2, 1), "mse")
    trainer.metadata["experiment"] = {
        **DIGITS,
        "callbacks": [{"name": "CSVLogger", "filename": "written.csv"}],
        "distributed": {"rank": 1, "world_size": 2, "master_addr": "127.0.0.1", "master_port": 9},
        "training": {"checkpoint_dir": "${SECRET_WORD}"},
    }
    trainer.save_checkpoint("kept.ckpt")
    experiment = cx.Experiment.from_checkpoint("kept.ckpt")
    experiment.join()
    assert experiment.evaluate() is not None
    assert experiment.config.training.checkpoint_dir == "${SECRET_WORD}"
    assert [*experiment.trainer.callbacks] == []
    assert not (own / "written.csv").exists()
    cx.finalize()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "value", "says"),
    [
        ("modle", {}, r"the config has no section 'modle'. Did you mean 'model'\?"),
        ("epochs", 3, r"the config has no section 'epochs'. Did you mean 'training.epochs'\?"),
        ("model", None, "the section 'model' needs a name"),
        ("model", {"hidden": [3]}, "the section 'model' needs a name"),
        ("model", {**MLP, "hiden": [3]}, r"the model 'mlp' has no setting 'hiden'. Did you mean 'hidden'\?"),
        ("model", "resnet", "no model 'resnet'. Known: cnn, mlp, vae"),
        ("model", "own_things:Nett", "own_things has no class or function 'Nett'"),
        (
            "model",
            "own_thinks:Net",
            "there is no module 'own_thinks'. It must be installed, or be in the current",
        ),
        ("model", "own_things:odd", "the model 'own_things:odd' must be a torch.nn.Module, but .* returned int"),
        ("data", "digit", r"no data set 'digit'. Did you mean 'digits'\?"),
        ("data", {"name": "digits", "target": False}, r"no setting 'target'. Did you mean 'targets'\?"),
        ("data", {"name": "npz", "path": "none.npz"}, "data.path: there is no file none.npz"),
        ("data", {"name": "npz", "path": "own_things.py"}, "own_things.py is not a valid .npz file"),
        ("data", "own_things:one", r"returned \(X, y\): return \(\(X, y\), \(X_test, y_test\)\)"),
        ("model", ":Net", 'write it as "module:name"'),
        ("model", "needy", "no model 'needy'"),
        ("imports", "own_things", r"the section 'imports' must be a list of modules"),
        ("imports", ["own_thinks"], "the module 'own_thinks': there is no module 'own_thinks'"),
        ("loss_fn", {"name": "CrossEntropyLoss", "weight": ["a"]}, "cannot be created with"),
        ("metrics", ["own_things:none"], "own_things has no class or function 'none'"),
        ("metrics", [3], "each of 'metrics' needs a name"),
        ("metrics", 3, "the section 'metrics' must be a list"),
        (
            "train_step",
            {"name": "own_things:loss"},
            "the section 'train_step' must be the name of a function, module:name",
        ),
        ("train_step", "own_things:none", "own_things has no class or function 'none'"),
        ("train_steps", "own_things:loss", r"no section 'train_steps'. Did you mean 'train_step'\?"),
        ("callbacks", [{"CSVLogger": "a.csv"}], "each of 'callbacks' needs a name, such as '- {name: EarlyStopping"),
        ("data", "own_things:no_data", r"must return \(train, test\), or a dictionary with 'train'.*got ndarray"),
        ("loss_fn", "cross_entrop", r"no loss 'cross_entrop'. Did you mean 'cross_entropy'\?"),
        ("loss_fn", {"name": "mse", "smoothing": 1}, "the loss 'mse' has no setting 'smoothing'"),
        ("optimizer", "adamm", r"no optimizer 'adamm'. Did you mean 'adam'\?"),
        ("optimizer", {"name": "adam", "learning_rate": 1}, "the optimizer 'adam' has no setting 'learning_rate'"),
        (
            "optimizer",
            {"name": "adam", "lr": -1},
            "the optimizer 'adam' cannot be created with {'lr': -1}: Invalid",
        ),
        (
            "optimizers",
            {"g": {"name": "adam", "modules": "head"}},
            "must name modules .* such as one of layers",
        ),
        ("optimizers", {"g": "adam"}, "modules must name modules of the model"),
        ("optimizers", ["adam"], "must have settings by the optimizers' names"),
        ("schedulers", {"g": "cosine"}, "the section 'schedulers' has no optimizer 'g'"),
        ("scheduler", "StepLR", "the scheduler 'StepLR' needs step_size"),
        ("scheduler", {"name": "own_things:decay", "powers": 2}, "has no setting 'powers'"),
        ("scheduler", "cosin", r"no scheduler 'cosin'. Did you mean 'cosine'\?"),
        ("callbacks", {"name": "EarlyStopping"}, "the section 'callbacks' must be a list"),
        ("callbacks", ["EarlyStoping"], r"no callback 'EarlyStoping'. Did you mean 'EarlyStopping'\?"),
        ("callbacks", [{"name": "CSVLogger"}], "the callback 'CSVLogger' needs filename"),
        ("training", {"epoch": 3}, r"the section 'training' has no setting 'epoch'. Did you mean 'epochs'\?"),
        ("training", {"max_epochs": 3}, r"no setting 'max_epochs'. Did you mean 'epochs'\?"),
        (
            "training",
            {"lr": 0.1},
            r"'training' has no setting 'lr': it belongs to the section 'optimizer', as in optimizer: \{name: adam, lr",
        ),
        ("training", {"metrics": ["f1"]}, "no setting 'metrics': it belongs to the section 'metrics'"),
        ("training", {"bucket_size_mb": 1}, "it belongs to the section 'distributed'"),
        ("distributed", {"epochs": 1}, "it belongs to the section 'training'"),
        (
            "optimizer",
            {"name": "adam", "lr": "fast"},
            r"the optimizer 'adam': lr must be a number, got 'fast' \(a string\)",
        ),
        ("training", {"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ("training", [3], r"the section 'training' must have settings by name, got \[3\]"),
        ("distributed", {"compresion": "bf16"}, r"no setting 'compresion'. Did you mean 'compression'\?"),
        ("distributed", {"backend": "mpi"}, "no backend 'mpi'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_file_and_the_remedy(own, section, value, says):
    with pytest.raises(cx.ConfigError, match=says) as caught:
        cx.Experiment({**DIGITS, section: value}, "experiment.yaml")
    assert str(caught.value).startswith("experiment.yaml: ")
    assert "\n" not in str(caught.value)


def test_a_file_of_arrays_must_have_known_names(own):
    np.savez("odd.npz", x_train=np.zeros((2, 64)), y_tran=np.zeros(2))
    np.savez("none.npz", y_train=np.zeros(2))
    for name, says in (("odd.npz", r"no array 'y_tran'. Did you mean 'y_train'\?"), ("none.npz", "has no x_train")):
        with pytest.raises(cx.ConfigError, match=says):
            cx.Experiment({**DIGITS, "data": {"name": "npz", "path": name}})


def test_a_file_that_is_empty_or_holds_one_array_without_a_name_is_refused(own):
    (own / "empty.npz").touch()
    np.save("one.npy", np.zeros((2, 64)))
    for name, says in (("empty.npz", "is not a valid .npz file"), ("one.npy", "holds a single array without a name")):
        with pytest.raises(cx.ConfigError, match=f"^the config: data.path: {name} .*{says}"):
            cx.Experiment({**DIGITS, "data": {"name": "npz", "path": name}})


def test_callbacks_are_made_for_each_experiment(own):
    values = {**DIGITS, "callbacks": [{"name": "CSVLogger", "filename": "log.csv"}], "training": QUIET}
    _, experiment = fitted(values)
    assert isinstance(experiment.trainer.callbacks[0], CSVLogger)
    assert (own / "log.csv").read_text().startswith("epoch")


def test_loaders_and_data_sets_may_be_any_part():
    rows = TensorDataset(torch.rand(12, 64), torch.zeros(12, dtype=torch.int64))
    experiment = cx.Experiment(DIGITS)
    experiment.data = type(experiment.data)(train=(DataLoader(rows, 4),), validation=(rows,), test=(rows,))
    experiment.trainer.fit(*experiment.data.train, validation_data=rows, **QUIET)
    assert experiment.evaluate() is not None
    cx.finalize()
