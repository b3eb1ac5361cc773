"""Settings: what is wrong is refused with the field, what it must be and what it is; a typing error with the cure."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import cyxtrain as cx

WHOLE_NUMBERS = (True, 2.0, "3", math.nan, np.float64(2))
NO_LIMIT = (0, -1.0, math.nan, math.inf, True, "1")
NO_BOOLEAN = (1, 0, "yes", None)

WRONG = {
    cx.DistributedConfig: {
        "rank": (-1, *WHOLE_NUMBERS),
        "world_size": (0, -1, *WHOLE_NUMBERS),
        "local_rank": (-1, *WHOLE_NUMBERS),
        "master_addr": ("", "  ", None, 5),
        "master_port": (0, -1, 65536, None, *WHOLE_NUMBERS),
        "backend": ("", "nclc", 3),
        "timeout_ms": (0, -1, None, *WHOLE_NUMBERS),
        "collective_timeout_ms": (0, -1, None, *WHOLE_NUMBERS),
        "require_secret": NO_BOOLEAN,
    },
    cx.DDPConfig: {
        "broadcast_parameters": NO_BOOLEAN,
        "bucket_size_mb": (0, -1, math.nan, math.inf, True, "25", None),
        "find_unused_parameters": NO_BOOLEAN,
        "gradient_as_bucket_view": NO_BOOLEAN,
        "static_graph": NO_BOOLEAN,
        "compression": ("fp32", "FP16", "", True, 16),
        "matrix_approximation_rank": (0, -1, None, *WHOLE_NUMBERS),
    },
    cx.AMPConfig: {
        "use_dynamic_scaling": NO_BOOLEAN,
        "dynamic_history_size": (0, -1, None, *WHOLE_NUMBERS),
        "initial_scale": (0, -1.0, 5e-324, 1e300, math.nan, math.inf, True, "1", None),
        "growth_factor": (1, 0.5, math.nan, math.inf, True, "2", None),
        "backoff_factor": (0, 1, -0.5, math.nan, True, "0.5", None),
    },
    cx.DistributedTrainingConfig: {
        "epochs": (0, -1, None, *WHOLE_NUMBERS),
        "batch_size": (0, -1, None, *WHOLE_NUMBERS),
        "effective_batch_size": (0, -1, *WHOLE_NUMBERS),
        "shuffle": NO_BOOLEAN,
        "seed": (-1, 2**64, None, *WHOLE_NUMBERS),
        "verbose": NO_BOOLEAN,
        "log_every_n_batches": (-1, None, *WHOLE_NUMBERS),
        "checkpoint_every_n_epochs": (-1, None, *WHOLE_NUMBERS),
        "checkpoint_every_n_steps": (-1, None, *WHOLE_NUMBERS),
        "checkpoint_every_n_minutes": (-1, math.nan, math.inf, True, "1", None),
        "max_time_seconds": (0, -1, math.nan, True, "1"),
        "on_nonfinite": ("ignore", None, True),
        "check_replicas_every_n_steps": (-1, 1.5, True, "1"),
        "accumulation_steps": (0, -1, None, *WHOLE_NUMBERS),
        "clip_norm": NO_LIMIT,
        "clip_value": NO_LIMIT,
        "clip_adaptive": NO_LIMIT,
        "precision": ("", "half", "float16", None, 16),
        "amp": (True, {}, "fp16"),
        "compile": ("fast", "", None, 1, 1.0),
        "float32_precision": ("tf32", "", True, 16),
        "channels_last": NO_BOOLEAN,
        "sync_batchnorm": NO_BOOLEAN,
        "drop_last": NO_BOOLEAN,
        "learning_rate_scaling": ("cubic", True, 1),
        "warmup_steps": (-1, None, *WHOLE_NUMBERS),
        "fused_optimizer": ("yes", None, 2),
        "keep_last": (-1, None, *WHOLE_NUMBERS),
        "keep_best": ("", 3, True),
        "on_save_error": ("", "ignore", None, True),
        "checkpoint_dir": ("", " ", None, 5),
        "save_on_master_only": NO_BOOLEAN,
        "validation_freq": (0, -1, None, [0], [2, "3"], *WHOLE_NUMBERS),
        "steps_per_epoch": (0, -1, *WHOLE_NUMBERS),
        "fast_dev_run": (-1, 1.5, None, "yes"),
        "sharded_data": (0, 1, "yes"),
        "profile": ("", " ", None, 1),
        "validation_steps": (0, -1, 1.5, "3"),
        "validation_batch_size": (0, -1, 1.5, "3"),
        "num_processes": (0, -1, 1.5, True, "3", "all"),
        "scheduler_interval": ("batch", 1, True),
        "max_steps": (0, -1, *WHOLE_NUMBERS),
        "validate_every_n_steps": (-1, None, *WHOLE_NUMBERS),
        "validate_every_n_minutes": (-1, math.nan, math.inf, True, "1", None),
        "log_every_n_steps": (-1, None, *WHOLE_NUMBERS),
        "validation_stratify": NO_BOOLEAN,
        "load_best": NO_BOOLEAN,
        "readers": (0, -1, *WHOLE_NUMBERS),
        "log_hashes": (0, -1, *WHOLE_NUMBERS),
        "virtual_ranks": (0, -1, *WHOLE_NUMBERS),
        "num_threads": (0, -1, *WHOLE_NUMBERS),
        "validation_split": (-0.1, 1.0, 2, math.nan, math.inf, True, "0.1", None),
    },
}
CASES = [(cls, name, value) for cls, fields in WRONG.items() for name, values in fields.items() for value in values]


def made(cls, **fields):
    """A config that is right but for what `fields` say."""
    if cls is cx.DistributedConfig:
        fields = {"rank": 0, "world_size": 4} | fields
    return cls(**fields)


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_every_field_is_here(cls):
    assert set(WRONG[cls]) == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_defaults_are_right(cls):
    cls().validate()


def refusal_of(call, *arguments):
    """The message with which a call is refused; "": it is not."""
    try:
        call(*arguments)
    except cx.ConfigError as error:
        return str(error)
    return ""


def test_wrong_values_are_refused_with_their_field_and_themselves():
    def validate(cls, name, value):
        made(cls, **{name: value}).validate()

    taken = []
    for cls, name, value in CASES:
        text = refusal_of(validate, cls, name, value)
        if name not in text or (repr(value) not in text and str(value) not in text):
            taken.append((cls.__name__, name, value, text))
    assert taken == []


def test_wrong_values_are_refused_also_when_they_are_assigned():
    for cls, name, value in CASES:
        config = made(cls)
        setattr(config, name, value)
        assert refusal_of(config.validate), (cls.__name__, name, value)


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_unknown_field_is_refused_with_the_nearest_known_one(cls):
    for name in WRONG[cls]:
        misspelt = name[:-1] + name[-1] * 2
        with pytest.raises(cx.ConfigError, match=f"{cls.__name__} has no field '{misspelt}'.*Did you mean '{name}'"):
            cls(**{misspelt: 1})
        with pytest.raises(cx.ConfigError, match=f"Did you mean '{name}'"):
            setattr(cls(), misspelt, 1)


def test_numbers_out_of_an_array_are_numbers():
    config = cx.DistributedTrainingConfig(epochs=np.int64(3), clip_norm=np.float32(0.5), shuffle=np.bool_(False))
    config.seed = np.uint64(7)
    config.validate()
    assert [type(value) for value in (config.epochs, config.clip_norm, config.shuffle, config.seed)] == [
        *(int, float, bool, int)
    ]


def test_the_names_that_others_have_are_known():
    for cls, theirs, ours in (
        (cx.AMPConfig, "growth_interval", "dynamic_history_size"),
        (cx.AMPConfig, "init_scale", "initial_scale"),
        (cx.DDPConfig, "bucket_cap_mb", "bucket_size_mb"),
        (cx.DistributedTrainingConfig, "gradient_clip_val", "clip_norm"),
        (cx.DistributedTrainingConfig, "devices", "num_processes"),
        (cx.DistributedTrainingConfig, "per_device_train_batch_size", "batch_size"),
        (cx.DistributedTrainingConfig, "bf16", "precision"),
        (cx.DistributedTrainingConfig, "tf32", "float32_precision"),
    ):
        with pytest.raises(cx.ConfigError, match=f"Did you mean '{ours}'"):
            cls(**{theirs: 1})
    with pytest.raises(
        cx.ConfigError, match=r"'compression': it belongs to DistributedTrainer\(ddp_config=cx.DDPConfig"
    ):
        cx.DistributedTrainingConfig(compression="fp16")
    with pytest.raises(cx.ConfigError, match=r"'scheduler': it belongs to DistributedTrainer\(scheduler="):
        cx.DistributedTrainingConfig(scheduler="cosine")


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("precision", "bf16-mixed", "bf16"),
        ("precision", "mixed_float16", "fp16"),
        ("precision", torch.bfloat16, "bf16"),
        ("precision", 16, "fp16"),
        ("float32_precision", "TF32", "high"),
    ],
)
def test_the_values_that_others_have_are_known(name, theirs, ours):
    with pytest.raises(cx.ConfigError, match=f"got {theirs!r}. Did you mean '{ours}'"):
        cx.DistributedTrainingConfig(**{name: theirs}).validate()


def test_a_rank_of_matrices_that_are_not_approximated_is_refused():
    with pytest.raises(cx.ConfigError, match=r"only compression='powersgd' approximates matrices.*is 'fp16'"):
        cx.DDPConfig(compression="fp16", matrix_approximation_rank=2).validate()
    cx.DDPConfig(compression="powersgd", matrix_approximation_rank=2).validate()


def test_unknown_field_without_a_near_one_gets_them_all():
    with pytest.raises(cx.ConfigError) as caught:
        cx.DDPConfig(xyzzy=1)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(cx.DDPConfig))


def test_config_error_is_a_value_error_too():
    with pytest.raises(ValueError, match="epochs"):
        cx.DistributedTrainingConfig(epochs=0).validate()


@pytest.mark.parametrize(("given", "missing"), [("rank", "world_size"), ("world_size", "rank")])
def test_rank_and_world_size_come_together(given, missing):
    with pytest.raises(cx.ConfigError, match=rf"{given} is set and {missing} is not"):
        cx.DistributedConfig(**{given: 1}).validate()


@pytest.mark.parametrize("rank", [4, 5])
def test_rank_outside_the_world_is_refused_with_the_highest_one(rank):
    with pytest.raises(cx.ConfigError, match=f"rank {rank} is outside a world of 4.*highest is 3"):
        cx.DistributedConfig(rank=rank, world_size=4).validate()


@pytest.mark.parametrize("name", ["cpu", "CPU", "ring", cx.BackendType.CPU])
def test_backend_is_found_by_any_of_its_names(name):
    assert cx.BackendType.parse(name) is cx.BackendType.CPU
    assert cx.BackendType.parse("Gloo") is cx.BackendType.GLOO


def test_unknown_backend_is_refused_with_the_nearest_one():
    with pytest.raises(cx.ConfigError, match=r"'nclc'.*Did you mean 'nccl'"):
        cx.BackendType.parse("nclc")


def test_checkpoint_dir_may_be_a_path_and_then_travels_as_json():
    config = cx.DistributedTrainingConfig(checkpoint_dir=Path("runs") / "1")
    config.validate()
    assert json.loads(json.dumps(dataclasses.asdict(config)))["checkpoint_dir"] == str(Path("runs") / "1")


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_settings_are_plain_dataclasses(cls):
    config = made(cls)
    assert config == made(cls)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config
    assert list(inspect.signature(cls).parameters) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_a_docstring_stands_under_each_field(cls):
    lines = [line.strip() for line in inspect.getsource(cls).splitlines()]
    for field in dataclasses.fields(cls):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{field.name}: "))
        assert lines[place + 1].startswith('"""'), field.name


def test_help_explains_every_field():
    for settings in (cx.DistributedTrainingConfig, cx.DistributedConfig, cx.DDPConfig):
        text = settings.__doc__
        for field in dataclasses.fields(settings):
            assert re.search(rf"^    {field.name}: .*\n        \S", text, re.MULTILINE), field.name


def test_epochs_of_validation_may_be_a_tuple():
    config = cx.DistributedTrainingConfig(validation_freq=(1, 3))
    config.validate()
    assert config.validation_freq == [1, 3]  # as JSON has it


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("node1:29500", "it has a port in it; set MASTER_ADDR=node1 and MASTER_PORT=29500"),
        ("[fe80::1]:29500", "it has a port in it; set MASTER_ADDR=fe80::1 and MASTER_PORT=29500"),
        ("tcp://node1:29500", "it has a port in it; set MASTER_ADDR=node1 and MASTER_PORT=29500"),
        ("tcp://node1", "it is a URL; give the host name alone"),
        (" node1", "it has a space before or after the name; set it to 'node1'"),
        ("node1\n", "it has a space before or after the name; set it to 'node1'"),
        (
            "node1 node2",
            "it has a space or a comma in it; give rank 0's machine alone, such as the first: 'node1'",
        ),
        (
            "node1,node2",
            "it has a space or a comma in it; give rank 0's machine alone, such as the first: 'node1'",
        ),
        ("node[1-4]", "it is a list of Slurm's"),
        ("gpu[07-09,12],login1", "it is a list of Slurm's"),
        ("[::1", "brackets belong around a whole IPv6 address"),
        ("[node1]", "brackets belong around a whole IPv6 address"),
    ],
)
def test_master_addr_that_is_no_host_gets_the_right_advice(address, advice):
    with pytest.raises(cx.ConfigError) as raised:
        cx.init(cx.DistributedConfig(rank=0, world_size=2, master_addr=address))
    assert f"master_addr (MASTER_ADDR) is {address!r}: {advice}" in str(raised.value)


@pytest.mark.parametrize(
    "address", ["node1", "node-1.example.org", "10.0.0.1", "fe80::1", "::1", "[::1]", "fe80::1%eth0"]
)
def test_master_addr_that_is_a_host_is_taken(address):
    cx.DistributedConfig(rank=0, world_size=2, master_addr=address).validate()
