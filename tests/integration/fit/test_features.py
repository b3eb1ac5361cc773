"""What a step may have, each alone and all at once: N ranks are one, and a resumed fit is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, flat, make_rows, run_world, seeded
from kept_worlds import close_worlds
from markers import by_night
from torch import nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, STEP = 43, 12
"""The last step of an epoch is of seven rows: uneven on any number of ranks."""
FEATURES_OF_A_STEP: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation_steps": 2},
    "clipping by norm": {"clip_norm": 0.5},
    "clipping by value": {"clip_value": 0.05},
    "adaptive clipping": {"clip_adaptive": 0.05},
    "a scaled rate": {"learning_rate_scaling": "sqrt"},
    "a warm-up": {"warmup_steps": 5},
    "cosine": {"scheduler": "cosine"},
    "the plain kernel": {"fused_optimizer": False},
    "recomputing": {"recomputes": True},
    "compression": {"compression": "powersgd"},
}
EXACT = {
    name: value for name, value in FEATURES_OF_A_STEP.items() if name not in ("clipping by value", "adaptive clipping")
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "amp": cx.AMPConfig(initial_scale=2.0**10)},
    "bf16 gradients": {"compression": "bf16"},
}


def together(features: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {name: value for feature in features.values() for name, value in feature.items()} | more


def fit(
    settings: dict[str, Any], double: bool = False, adam: bool = True, dropout: float = 0.0, **fields: Any
) -> dict[str, Any]:
    settings = dict(settings)
    compression = settings.pop("compression", None)
    columns = STEP if compression == "powersgd" else 1
    dtype = torch.float64 if double else torch.float32
    with seeded():
        layers = [nn.Linear(FEATURES, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Tanh()]
        model = nn.Sequential(*layers, nn.Linear(32, 3)).to(dtype)
    trainer = cx.DistributedTrainer(
        model,
        nn.CrossEntropyLoss(),
        # Where 16 bits decide about the sign of a gradient, Adam would make a whole step of it.
        torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        if adam
        else torch.optim.SGD(model.parameters(), 0.1),
        scheduler=settings.pop("scheduler", None),
        # As many columns as a step has rows: what a linear layer's gradient has of directions.
        ddp_config=cx.DDPConfig(compression=compression, matrix_approximation_rank=settings.pop("width", columns)),
    )
    if settings.pop("recomputes", False):
        trainer.enable_gradient_checkpointing()
    inputs, targets = make_rows(ROWS)
    given = {"epochs": 3, "effective_batch_size": STEP, "batch_size": 3, "verbose": False}
    history = trainer.fit(inputs.to(dtype), targets, **{**given, **settings, **fields})
    return {"bits": fingerprint(model), "parameters": flat(model.parameters()), "losses": history.train_losses}


def assert_n_ranks_are_one(world_size: int, settings: dict[str, Any], double: bool, tolerance: float) -> None:
    # Where 16 bits decide about the sign of a gradient, SGD steps: `fit` says why.
    [alone] = everywhere(1, fit, settings, double, double)
    for found in run_world(world_size, fit, settings, double, double):
        np.testing.assert_allclose(found["parameters"], alone["parameters"], rtol=0, atol=tolerance)
        assert found["losses"] == pytest.approx(alone["losses"], abs=tolerance)


def each_by_night(features: dict[str, dict[str, Any]]) -> list[Any]:
    return [by_night(value, id=name) for name, value in features.items()]


@pytest.mark.parametrize("world_size", [2, by_night(3)])
@pytest.mark.parametrize("settings", [pytest.param(together(EXACT), id="all"), *each_by_night(FEATURES_OF_A_STEP)])
def test_n_ranks_are_one(settings, world_size):
    assert_n_ranks_are_one(world_size, settings, double=True, tolerance=1e-8)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "settings", each_by_night(IN_16_BITS) + each_by_night({"all": together({**EXACT, **IN_16_BITS})})
)
def test_n_ranks_are_one_as_closely_as_16_bits_allow(settings, world_size):
    assert_n_ranks_are_one(world_size, settings, double=False, tolerance=1e-2)


def resume_from_each(folder: str, settings: dict[str, Any], every: int) -> list[str]:
    """The bits of an uninterrupted fit, then of one resumed from every n-th of its checkpoints."""
    fields: dict[str, Any] = {"dropout": 0.3, "checkpoint_dir": folder}
    whole = fit(settings, checkpoint_every_n_steps=5, checkpoint_every_n_epochs=1, **fields)
    paths = sorted(Path(folder).glob("*.ckpt"))
    assert len(paths) == 2 + 3  # twelve steps, every fifth; three ends of epochs
    resumed = [fit(settings, resume=str(path), **fields) for path in paths[::every]]
    return [found["bits"] for found in (whole, *resumed)]


ALL = together({**EXACT, **IN_16_BITS}, precision="fp16", compression="powersgd", width=1)
ALL["amp"] = cx.AMPConfig(initial_scale=2.0**22, dynamic_history_size=4)


@pytest.mark.parametrize(
    "settings", [pytest.param(ALL, id="all"), *each_by_night({**FEATURES_OF_A_STEP, **IN_16_BITS})]
)
@pytest.mark.parametrize(("world_size", "every"), [(2, 2), *(by_night(world_size, 1) for world_size in (1, 2, 3))])
def test_a_resumed_fit_is_the_uninterrupted_one(world_size, every, settings, tmp_path):
    close_worlds()  # what resumes is another process
    for found in everywhere(world_size, resume_from_each, str(tmp_path), settings, every):
        assert len(found) > 3
        assert len(set(found)) == 1
