"""Every setting of a fit has one policy, and a difference from a checkpoint is described by it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import cyxtrain as cx
from cyxtrain.training.inputs.facts import POLICIES, Policy, config_facts, differing_settings


def test_every_setting_has_one_policy():
    settings = (
        field.name for kind in (cx.DistributedTrainingConfig, cx.AMPConfig) for field in dataclasses.fields(kind)
    )
    assert Counter(name for names in POLICIES.values() for name in names.split()) == Counter(settings)


def test_ranks_compare_all_settings_but_their_own():
    named = {f"the setting {field.name}" for field in dataclasses.fields(cx.DistributedTrainingConfig)}
    assert named - config_facts(cx.DistributedTrainingConfig()).keys() == {
        "the setting verbose",
        "the setting checkpoint_dir",
        "the setting profile",
    }


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default():
    config = cx.DistributedTrainingConfig(seed=7, warmup_steps=3, clip_norm=1.0, epochs=2)
    found = differing_settings({}, config)
    assert found[Policy.EQUAL] == {"seed": "seed is 7 and was 42"}
    assert found[Policy.CHECKPOINT] == {"warmup_steps": "warmup_steps 0 as in the checkpoint (the program has 3)"}
    assert found[Policy.PROGRAM] == {"clip_norm": "clip_norm was None and is 1.0"}


def test_loss_scaling_is_compared_where_both_scale_the_loss():
    config = cx.DistributedTrainingConfig(precision="fp16", amp=cx.AMPConfig(initial_scale=8.0, growth_factor=4.0))
    scaled = dataclasses.asdict(cx.DistributedTrainingConfig(precision="fp16"))
    found = differing_settings(scaled, config)
    assert found[Policy.CHECKPOINT].keys() == {"initial_scale"}
    assert found[Policy.PROGRAM] == {"growth_factor": "growth_factor was 2.0 and is 4.0"}
    assert differing_settings({}, config)[Policy.PROGRAM] == {}
