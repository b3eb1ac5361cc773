"""Claims about what a trainer keeps: files of which a fresh one, on any number of ranks, goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import adam, fingerprint, make_model, make_rows, one_process, run_world
from torch import nn

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS = make_rows(11)
OPTIMIZERS: dict[str, Any] = {
    "adam": adam,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def trainer_of(optimizer: str = "adam", shift: float = 0.0, hidden: nn.Module | None = None) -> cx.DistributedTrainer:
    model = make_model() if hidden is None else nn.Sequential(make_model(), hidden)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shift
    return cx.DistributedTrainer(model, "cross_entropy", OPTIMIZERS[optimizer](model))


def fit(trainer: cx.DistributedTrainer, epochs: int, **keywords: Any) -> list[float]:
    history = trainer.fit(*ROWS, epochs=epochs, effective_batch_size=4, verbose=False, **keywords)
    return list(history.train_losses)


def enter_own_folder(folder: str) -> Path:
    """Ranks share no disk: each has its own folder."""
    own = Path(folder) / f"rank{cx.get_rank()}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    return own


def files() -> list[str]:
    return sorted(str(file.relative_to(Path.cwd())) for file in Path.cwd().rglob("*") if file.is_file())


def resume_from(folder: str) -> dict[str, list[Any]]:
    """Trains for 4 epochs at once; and for 2, saves, and for 2 more in a fresh trainer with other weights."""
    enter_own_folder(folder)
    found = {}
    for name in OPTIMIZERS:
        whole = trainer_of(name)
        losses = fit(whole, 4)
        first = trainer_of(name)
        first_losses = fit(first, 2)
        first.save_checkpoint(f"saved/{name}.ckpt")
        second = trainer_of(name, shift=1 + cx.get_rank())
        second.load_checkpoint(f"saved/{name}.ckpt")
        same = fingerprint(second.model) == fingerprint(first.model)
        resumed = first_losses + fit(second, 2)
        ours = [fingerprint(whole.model), losses, whole.epoch]
        found[name] = [same, ours == [fingerprint(second.model), resumed, second.epoch], *ours]
    return {**found, "files": files()}


def test_a_fresh_trainer_goes_on_bit_for_bit_where_only_rank_0_has_the_file(tmp_path):
    ranks = run_world(2, resume_from, str(tmp_path))
    for rank in ranks:
        for name in OPTIMIZERS:
            assert rank[name][:2] == [True, True]
            assert rank[name][-1] == 4
            assert rank[name] == ranks[0][name]
    assert [rank["files"] for rank in ranks] == [["saved/adam.ckpt", "saved/momentum.ckpt"], []]


def load_and_fit(path: str) -> list[Any]:
    trainer = trainer_of(shift=1)
    trainer.load_checkpoint(path)
    return [trainer.epoch, fingerprint(trainer.model), fit(trainer, 1)]


def test_another_number_of_ranks_loads_the_same_state(tmp_path):
    path = tmp_path / "alone.ckpt"
    with one_process():
        trainer = trainer_of()
        fit(trainer, 2)
        trainer.save_checkpoint(path)
        expected = [2, fingerprint(trainer.model), fit(trainer, 1)]
    for world_size in (2, 3):
        for epoch, bits, losses in run_world(world_size, load_and_fit, str(path)):
            assert [epoch, bits] == expected[:2]
            assert losses == pytest.approx(expected[2], abs=1e-6)


def save_often(folder: str) -> dict[str, Any]:
    own = enter_own_folder(folder)
    whole = trainer_of()
    fit(whole, 5, checkpoint_every_n_epochs=2, checkpoint_dir=Path("on") / "master")
    fit(trainer_of(), 2, checkpoint_every_n_epochs=1, checkpoint_dir="on/each", save_on_master_only=False)
    fit(trainer_of(), 2)
    half = trainer_of(shift=1)
    half.load_checkpoint("on/master/epoch-0004.ckpt")
    at_four = half.epoch
    fit(half, 1, checkpoint_every_n_epochs=5, checkpoint_dir="again")
    return {
        "files": files(),
        "epoch": at_four,
        "goes on": fingerprint(half.model) == fingerprint(whole.model),
        "own": fingerprint(whole.model) if own.exists() else "",
    }


def test_checkpoints_come_every_so_many_epochs_and_from_rank_0_unless_told_otherwise(tmp_path):
    first, second = run_world(2, save_often, str(tmp_path))
    assert first["files"] == [
        "again/epoch-0005.ckpt",
        *(f"on/each/epoch-000{epoch}-rank0.ckpt" for epoch in (1, 2)),
        *(f"on/master/epoch-000{epoch}.ckpt" for epoch in (2, 4, 5)),  # the last one at the end
    ]
    assert second["files"] == [f"on/each/epoch-000{epoch}-rank1.ckpt" for epoch in (1, 2)]
    for found in (first, second):
        assert found["epoch"] == 4
        assert found["goes on"]
    state = read_checkpoint(tmp_path / "rank0" / "on" / "master" / "epoch-0004.ckpt")
    assert state.position["epoch"] == 4
    assert state.world_size == 2
    assert state.history["epochs"] == [1, 2, 3, 4]
    assert state.config["checkpoint_every_n_epochs"] == 2
    each = [tmp_path / f"rank{rank}" / "on" / "each" / f"epoch-0002-rank{rank}.ckpt" for rank in (0, 1)]
    # The very same training: only the times in the history are of this run.
    assert torch.equal(read_checkpoint(each[0]).model["0.weight"], read_checkpoint(each[1]).model["0.weight"])


def refuse_all(folder: str) -> dict[str, Any]:
    """Loads and saves what cannot be; returns the errors, and whether anything has changed."""
    own = enter_own_folder(folder)
    trainer = trainer_of()
    fit(trainer, 1)
    trainer.save_checkpoint("good.ckpt")
    trainer_of("momentum").save_checkpoint("momentum.ckpt")
    trainer_of(hidden=nn.Linear(3, 3)).save_checkpoint("larger.ckpt")
    if trainer.is_master():
        content = bytearray(Path("good.ckpt").read_bytes())
        content[len(content) // 2] ^= 1
        Path("flipped.ckpt").write_bytes(content)
        Path("short.ckpt").write_bytes(content[:-100])
        Path("empty.ckpt").write_bytes(b"")
    before = [fingerprint(trainer.model), trainer.epoch, str(trainer.optimizer.state_dict())]
    found: dict[str, Any] = {}
    for name in ("flipped", "short", "empty", "absent", "momentum", "larger"):
        try:
            trainer.load_checkpoint(f"{name}.ckpt")
            found[name] = "loaded"
        except cx.CheckpointError as error:
            found[name] = str(error)
    found["changed"] = before != [fingerprint(trainer.model), trainer.epoch, str(trainer.optimizer.state_dict())]
    if trainer.is_master():
        (own / "file").touch()
    try:
        fit(trainer, 2, checkpoint_every_n_epochs=1, checkpoint_dir="file", on_save_error="raise")
        found["into a file"] = "saved"
    except cx.CheckpointError as error:
        found["into a file"] = str(error)
    fit(trainer, 1)
    return found


def test_what_cannot_be_loaded_or_saved_is_an_error_on_every_rank_and_changes_nothing(tmp_path):
    first, second = run_world(2, refuse_all, str(tmp_path))
    assert first.pop("changed") is second.pop("changed") is False
    writing = first.pop("into a file")
    assert "file" in writing
    assert second.pop("into a file") == f"rank 0: {writing}"
    assert first == second
    assert "is corrupt" in first["flipped"]
    assert first["absent"].startswith("There is no checkpoint absent.ckpt")
    assert "1.weight" in first["larger"]
    assert "momentum" in first["momentum"] or "betas" in first["momentum"]
    for name in ("short", "empty"):
        assert f"{name}.ckpt" in first[name]


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "saved.ckpt"
    with one_process():
        trainer = trainer_of()
        trainer.save_checkpoint(path)
        content = path.read_bytes()
        trainer.optimizer.param_groups[0]["lr"] = object()
        with pytest.raises(cx.CheckpointError, match="lr"):
            trainer.save_checkpoint(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_weights_alone_go_into_another_model(tmp_path):
    trained, fresh = trainer_of(), trainer_of(shift=1).model
    with one_process():
        fit(trained, 1)
    cx.save_weights(trained.model, tmp_path / "weights.safetensors")
    cx.load_weights(fresh, tmp_path / "weights.safetensors")
    assert fingerprint(fresh) == fingerprint(trained.model)
    before = make_model(outputs=5)
    with pytest.raises(cx.CheckpointError, match=r"2\.weight is \[3, 8\] there and \[5, 8\] in the model"):
        cx.load_weights(before, tmp_path / "weights.safetensors")
    assert fingerprint(before) == fingerprint(make_model(outputs=5))


def load_on_each_rank(folder: str) -> list[Any]:
    """Load a file of PyTorch, first into a model of another shape; each rank begins with other weights."""
    model = trainer_of(shift=1 + cx.get_rank()).model
    with pytest.raises(cx.CheckpointError) as caught:
        cx.load_weights(make_model(outputs=5), f"{folder}/weights.pt", strict=False)
    found = cx.load_weights(model, f"{folder}/weights.pt", strict=False)
    return [str(caught.value), *found, fingerprint(model)]


def test_each_rank_loads_the_weights_of_another_library_or_raises_the_same_error(tmp_path):
    state = make_model().state_dict()
    torch.save({**state, "old": torch.zeros(1)}, tmp_path / "weights.pt")
    ranks = run_world(2, load_on_each_rank, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert "2.weight is [3, 8] there and [5, 8] in the model, 2.bias is [3] there" in ranks[0][0]
    assert ranks[0][1:] == [[], ["old"], fingerprint(make_model())]


def test_loading_keeps_the_optimizer_on_the_models_parameters(tmp_path):
    with one_process():
        trainer = trainer_of()
        fit(trainer, 1)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        parameters = list(trainer.model.parameters())
        trainer.load_checkpoint(tmp_path / "saved.ckpt")
        assert all(now is then for now, then in zip(trainer.model.parameters(), parameters, strict=True))
        assert all(parameter in trainer.optimizer.state for parameter in parameters)


def test_the_best_of_what_a_fit_does_not_measure_is_refused(tmp_path):
    model, (inputs, _) = make_model(outputs=1), make_rows(12)
    trainer = cx.DistributedTrainer(model, "mse", adam(model))
    with one_process(), pytest.raises(cx.ConfigError, match="keep_best='accuracy': no such metric in this run"):
        trainer.fit(inputs, inputs[:, :1], epochs=1, keep_best="accuracy", checkpoint_dir=str(tmp_path), verbose=False)


class Phased(torch.optim.SGD):
    """A user's own optimizer, which keeps something else than a number under "step"."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = {"warm": 1, "count": state.get("step", {"count": 0})["count"] + 1}
        return super().step(closure)


def test_an_optimizer_of_ones_own_may_keep_what_it_likes_as_step(tmp_path):
    def counts(trainer: cx.DistributedTrainer) -> list[dict[str, Any]]:
        return [state["step"] for state in trainer.optimizer.state.values()]

    with one_process():
        trainers = []
        for _ in range(2):
            model = make_model()
            trainers.append(cx.DistributedTrainer(model, "cross_entropy", Phased(model.parameters(), 0.1)))
        first, second = trainers
        settings = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "verbose": False}
        first.fit(*make_rows(12), epochs=1, **settings)
        second.fit(*make_rows(12), epochs=1, resume="auto", **settings)
        assert counts(second) == counts(first) != []
