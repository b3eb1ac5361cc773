"""A resumed fit says what the program has given otherwise: what the checkpoint puts back, and what changes from here.

A cosine follows the epochs of the fit as they are now.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import Trace, fingerprint, make_model, make_rows, one_process, run_new_world
from torch.optim import lr_scheduler as schedulers

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

STEPS = 5  # of an epoch
SETTINGS = {"epochs": 2, "effective_batch_size": 8, "batch_size": 4}


def fit(
    scheduler: Any = None, rate: float = 0.1, momentum: float = 0.9, **more: Any
) -> tuple[list[float], cx.DistributedTrainer]:
    model, trace = make_model(), Trace()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=scheduler)
    trainer.fit(*make_rows(40), callbacks=[trace], **{**SETTINGS, **more})
    return trace.rates, trainer


def resumed(folder: Path, capsys: Any, *, first: dict[str, Any], then: dict[str, Any]) -> tuple[str, str]:
    """Trains with checkpoints, then goes on from one in the middle; returns what the header and the warnings say."""
    with one_process(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(checkpoint_every_n_steps=3, checkpoint_dir=str(folder), **first)
        capsys.readouterr()
        path = sorted(folder.glob("step-*.ckpt"))[1]
        caught.clear()
        fit(resume=str(path), **then)
    return " ".join(capsys.readouterr().out.split()), " ".join(str(warning.message) for warning in caught)


def test_a_cosine_follows_the_epochs_as_they_are_where_a_fit_goes_on(tmp_path, capsys):
    for warm in (0, 4, 9):  # the last is not over where the fit goes on
        with one_process():
            fit("cosine", checkpoint_every_n_steps=3, checkpoint_dir=f"{tmp_path}/{warm}", warmup_steps=warm)
            whole, _ = fit("cosine", epochs=3, warmup_steps=warm)
            capsys.readouterr()
            path = sorted(Path(f"{tmp_path}/{warm}").glob("step-*.ckpt"))[1]
            rest, _ = fit("cosine", epochs=3, warmup_steps=warm, resume=str(path))
        assert rest == pytest.approx(whole[-len(rest) :], rel=1e-12)
        assert 0 < len(rest) < len(whole)
        words = "the cosine ends with step 15, as epochs are now (with 10 in the checkpoint)"
        assert words in " ".join(capsys.readouterr().out.split())


def stretched_and_cut_off(folder: str) -> list[str]:
    """The bits of a fit whose epochs were raised, and of one that was cut off after that."""
    fit("cosine", checkpoint_every_n_epochs=1, checkpoint_dir=folder, verbose=False)
    first = str(Path(folder, "epoch-0001.ckpt"))
    raised = {"epochs": 4, "verbose": False, "checkpoint_dir": f"{folder}/raised"}
    _, whole = fit("cosine", resume=first, checkpoint_every_n_steps=1, **raised)
    later = sorted(Path(folder, "raised").glob("step-*.ckpt"))[-3]
    _, again = fit("cosine", resume=str(later), **raised)
    return [fingerprint(whole.model), fingerprint(again.model)]


@pytest.mark.nightly
def test_a_fit_whose_cosine_was_stretched_resumes_bit_for_bit(tmp_path):
    for rank, (whole, again) in enumerate(run_new_world(2, stretched_and_cut_off, str(tmp_path))):
        assert whole == again, rank


def test_nothing_is_said_where_nothing_was_given_otherwise(tmp_path, capsys):
    cycle = {"scheduler": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, 10)}
    parts = {
        "scheduler": lambda optimizer: schedulers.SequentialLR(
            optimizer, [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.MultiStepLR(optimizer, [1, 3, 3])], [2]
        )
    }
    scaled = {"learning_rate_scaling": "sqrt", "warmup_steps": 7, "scheduler": "cosine", "clip_norm": 1.0}
    half = {"precision": "fp16", "amp": cx.AMPConfig(initial_scale=2.0**20, dynamic_history_size=2)}
    for number, settings in enumerate((cycle, parts, scaled, half, {"accumulation_steps": 2, "rate": 0.03})):
        folder = tmp_path / str(number)
        header, warned = resumed(folder, capsys, first=settings, then=settings)
        assert "as in the checkpoint" not in header
        assert warned == ""


def test_what_the_checkpoint_puts_back_is_said(tmp_path, capsys):
    def stepping(size: int) -> Any:
        return lambda optimizer: schedulers.StepLR(optimizer, size)

    header, warned = resumed(
        tmp_path,
        capsys,
        first={"scheduler": stepping(4), "warmup_steps": 2, "precision": "fp16"},
        then={
            "scheduler": stepping(6),
            "rate": 0.2,
            "momentum": 0.8,
            "warmup_steps": 3,
            "precision": "fp16",
            "learning_rate_scaling": "linear",
            "amp": cx.AMPConfig(initial_scale=2.0),
        },
    )
    for words in (
        "lr 0.1 as in the checkpoint (the program has 0.2)",
        "momentum 0.9 as in the checkpoint (the program has 0.8)",
        "step_size 4 as in the checkpoint (the program has 6)",
        "warmup_steps 2 as in the checkpoint (the program has 3)",
        "learning_rate_scaling None as in the checkpoint (the program has linear)",
        "initial_scale 32768.0 as in the checkpoint (the program has 2.0)",
    ):
        assert words in header
    assert "as in the checkpoint" not in warned


def test_a_silent_fit_warns_once_of_what_the_checkpoint_puts_back(tmp_path, capsys):
    header, warned = resumed(tmp_path, capsys, first={}, then={"rate": 0.2, "momentum": 0.8, "verbose": False})
    assert header == ""
    both = [("lr 0.1", 0.2), ("momentum 0.9", 0.8)]
    words = [f"{saved} as in the checkpoint (the program has {own})" for saved, own in both]
    assert re.findall(r"step-\d+\.ckpt: (.*)\.", warned) == ["; ".join(words)]


def test_what_was_put_back_is_in_the_next_checkpoint_too(tmp_path, capsys):
    with one_process():
        fit(warmup_steps=4, checkpoint_every_n_steps=3, checkpoint_dir=str(tmp_path))
        for _ in range(2):
            capsys.readouterr()
            fit(warmup_steps=2, checkpoint_every_n_steps=3, checkpoint_dir=str(tmp_path), resume="auto", epochs=3)
            assert "warmup_steps 4 as in the checkpoint (the program has 2)" in " ".join(
                capsys.readouterr().out.split()
            )


def test_what_is_done_otherwise_from_here_on_is_warned_of(tmp_path, capsys):
    _, warned = resumed(
        tmp_path,
        capsys,
        first={"precision": "fp16", "clip_value": 0.5},
        then={"precision": "fp16", "clip_norm": 1.0, "accumulation_steps": 2, "amp": cx.AMPConfig(growth_factor=4.0)},
    )
    for words in (
        "continues with other settings: accumulation_steps",
        "clip_norm was None and is 1.0",
        "clip_value was 0.5 and is None",
        "accumulation_steps was 1 and is 2",
        "growth_factor was 2.0 and is 4.0",
    ):
        assert words in warned


def test_a_warm_up_that_does_not_end_is_warned_of():
    with one_process(), pytest.warns(UserWarning, match="warmup_steps=11 and this fit has 10 steps"):
        fit(warmup_steps=11, verbose=False)


def test_a_batch_size_that_is_not_used_may_be_another(tmp_path):
    with one_process():
        fit(checkpoint_every_n_steps=3, checkpoint_dir=str(tmp_path), verbose=False)
        path = str(sorted(tmp_path.glob("step-*.ckpt"))[1])
        fit(resume=path, batch_size=5, verbose=False)
        with pytest.raises(cx.ConfigError, match="batch_size is 5 and was 4"):
            fit(resume=path, batch_size=5, learning_rate_scaling="linear", verbose=False)


@pytest.mark.parametrize("scheduler", [None, "cosine", lambda optimizer: schedulers.StepLR(optimizer, 100)])
def test_a_rate_that_is_set_between_two_fits_is_what_they_are_given(tmp_path, capsys, scheduler):
    scaled = {"learning_rate_scaling": "linear", "warmup_steps": 2, "epochs": 2}
    with one_process():
        _, trainer = fit(scheduler, **scaled)
        trainer.save_checkpoint(tmp_path / "here.ckpt")
        for again in (trainer, fit(scheduler, rate=0.5, epochs=1, verbose=False)[1]):
            if again is not trainer:
                again.load_checkpoint(tmp_path / "here.ckpt")
            again.optimizer.param_groups[0]["lr"] = 0.02
            trace = Trace()
            capsys.readouterr()
            again.fit(*make_rows(40), callbacks=[trace], **{**SETTINGS, **scaled})
            assert trace.rates[:3] == pytest.approx([0.02, 0.04, 0.04])
            assert "rate 0.04, 2 times what was given" in " ".join(capsys.readouterr().out.split())


def test_the_rate_in_the_header_is_that_of_the_plan_wherever_a_fit_goes_on(tmp_path, capsys):
    scaled = {"learning_rate_scaling": "linear", "warmup_steps": 3, "scheduler": "cosine"}
    with one_process():
        fit(checkpoint_every_n_steps=1, checkpoint_dir=str(tmp_path), **scaled)
        for path in sorted(tmp_path.glob("step-*.ckpt"))[::3]:
            capsys.readouterr()
            fit(resume=str(path), **scaled)
            assert "rate 0.2, 2 times what was given" in " ".join(capsys.readouterr().out.split())
