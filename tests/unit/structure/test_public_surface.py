"""The public surface is one explicit list: what a guide writes keeps working, and importing does nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest
import torch.distributed as dist

import cyxtrain as cx
import cyxtrain.distributed

# Names of the contract; what a later part brings is added here when it comes.
PROCESSES = [
    "DistributedConfig", "BackendType",
    "init", "finalize", "init_process_group", "destroy_process_group",
    "is_initialized", "get_rank", "get_world_size", "get_local_rank", "is_master",
    "ReduceOp", "all_reduce", "broadcast", "all_gather", "all_gather_with_grad", "reduce_scatter", "scatter", "gather",
    "reduce", "barrier",
    "send", "recv",
]  # fmt: skip
DATA = ["datasets", "DistributedSampler", "DistributedBatchIterator"]
GRADIENTS = ["DDPConfig", "DistributedDataParallel"]
TRAINING = [
    "DistributedTrainingConfig", "AMPConfig", "create_default_amp_config", "DistributedTrainer",
    "DistributedAMPTrainer", "count_steps", "open_predictions", "callbacks", "metrics",
    "TrainingHistory", "DistributedTrainingHistory",
    "save_weights", "load_weights",
]  # fmt: skip
EXPERIMENTS = ["Config", "Experiment", "register_model", "get_model", "list_models"]
ERRORS = [
    "CyxtrainError", "NotInitializedError", "ConfigError", "BackendUnavailableError", "RendezvousError",
    "PeerLostError", "PeerSilentError", "CollectiveTimeoutError", "CollectiveMismatchError",
    "DamagedFrameError", "CheckpointError",
    "DistributedTrainingError", "NonFiniteError", "ReplicasDifferError",
]  # fmt: skip

SIGNATURES = {
    "init": "(config=None)",
    "finalize": "()",
    "init_process_group": "(backend=None, init_method=None, timeout=None, world_size=None, rank=None)",
    "destroy_process_group": "()",
    "is_initialized": "()",
    "get_rank": "()",
    "get_world_size": "()",
    "get_local_rank": "()",
    "is_master": "()",
    "DistributedConfig": "(rank=None, world_size=None, local_rank=None, master_addr='127.0.0.1', master_port=29500, "
    "backend=None, timeout_ms=30000, collective_timeout_ms=1800000, require_secret=False)",
    "DistributedConfig.from_environment": "()",
    "DDPConfig": "(broadcast_parameters=True, bucket_size_mb=25, find_unused_parameters=False, "
    "gradient_as_bucket_view=True, static_graph=False, "
    "compression=None, matrix_approximation_rank=1)",
    "DistributedDataParallel": "(model, config=None, *, device_ids=None, output_device=None, **fields)",
    "DistributedDataParallel.forward": "(self, *inputs, **named_inputs)",
    "DistributedDataParallel.backward": "(self, t)",
    "DistributedDataParallel.sync_gradients": "(self)",
    "DistributedDataParallel.update_parameters": "(self, optimizer)",
    "DistributedDataParallel.no_sync": "(self)",
    "DistributedDataParallel.check_replicas": "(self)",
    "DistributedDataParallel.register_comm_hook": "(self, state, hook)",
    "DistributedDataParallel.get_model": "(self)",
    "DistributedDataParallel.get_rank": "(self)",
    "DistributedDataParallel.get_world_size": "(self)",
    "DistributedDataParallel.is_master": "(self)",
    "DistributedSampler": "(dataset_size, shuffle=True, seed=42, drop_last=False, *, rank=None, world_size=None, "
    "pad=True, num_replicas=None)",
    "DistributedSampler.set_epoch": "(self, epoch)",
    "DistributedSampler.get_indices": "(self)",
    "DistributedSampler.local_size": "(self)",
    "DistributedSampler.total_size": "(self)",
    "DistributedSampler.padded_size": "(self)",
    "DistributedSampler.state_dict": "(self)",
    "DistributedBatchIterator.has_next": "(self)",
    "DistributedBatchIterator.next": "(self)",
    "DistributedBatchIterator.num_batches": "(self)",
    "DistributedTrainer": "(model, loss_fn=None, optimizer='adam', *, optimizers=None, loss_weights=None, "
    "metrics=None, scheduler=None, schedulers=None, scheduler_interval='step', callbacks=(), ddp_config=None, "
    "device='auto', train_step=None, "
    "test_step=None, predict_step=None)",
    "count_steps": "(*data, **keywords)",
    "open_predictions": "(folder)",
    "DistributedTrainer.train_step": "(self, batch)",
    "DistributedTrainer.test_step": "(self, batch)",
    "DistributedTrainer.predict_step": "(self, batch)",
    "DistributedTrainer.fit": "(self, X=None, y=None, *more, X_val=None, y_val=None, config=None, "
    "validation_data=None, validation_groups=None, sample_weight=None, class_weight=None, callbacks=None, "
    "initial_epoch=None, resume=None, **settings)",
    "DistributedTrainer.evaluate": "(self, X, y=None, *, batch_size=None, distributed=True, sample_weight=None, "
    "callbacks=None, steps=None, verbose=0, return_dict=False)",
    "DistributedTrainer.predict": "(self, X, *, batch_size=None, distributed=True, output_dir=None, pad_value=None, "
    "callbacks=None, steps=None, verbose=0)",
    "DistributedTrainer.save_checkpoint": "(self, path)",
    "DistributedTrainer.load_checkpoint": "(self, path)",
    "DistributedAMPTrainer": "(model, config=None, rank=None, world_size=None, *, accumulation_steps=1, "
    "learning_rate=0.001, optimizer=None, loss_fn=None)",
    "DistributedAMPTrainer.training_step": "(self, batch)",
    "DistributedAMPTrainer.save_checkpoint": "(self, path, include_optimizer=True, metadata=None)",
    "DistributedAMPTrainer.load_checkpoint": "(self, path)",
    "DistributedTrainer.is_master": "(self)",
    "DistributedTrainer.get_rank": "(self)",
    "DistributedTrainer.get_world_size": "(self)",
    "DistributedTrainingConfig": "(epochs=10, batch_size=64, effective_batch_size=None, shuffle=True, seed=42, "
    "verbose=True, log_every_n_batches=0, checkpoint_every_n_epochs=0, checkpoint_dir='./checkpoints', "
    "save_on_master_only=True, validation_split=0.0, checkpoint_every_n_steps=0, checkpoint_every_n_minutes=0.0, "
    "max_time_seconds=None, keep_last=0, keep_best=None, on_save_error='warn', "
    "on_nonfinite='raise', check_replicas_every_n_steps=None, accumulation_steps=1, clip_norm=None, clip_value=None, "
    "clip_adaptive=None, precision='fp32', amp=None, compile=False, sync_batchnorm=False, "
    "learning_rate_scaling=None, "
    "warmup_steps=0, fused_optimizer='auto', validation_freq=1, steps_per_epoch=None, "
    "fast_dev_run=False, sharded_data=None, profile=False, "
    "validation_steps=None, validation_batch_size=None, num_processes=None, "
    "scheduler_interval=None, drop_last=False, float32_precision=None, channels_last=False, "
    "max_steps=None, validate_every_n_steps=0, validate_every_n_minutes=0.0, log_every_n_steps=0, "
    "validation_stratify=False, load_best=False, readers=None, "
    "virtual_ranks=None, num_threads=None, log_hashes=None)",
    "AMPConfig": "(use_dynamic_scaling=True, dynamic_history_size=2000, initial_scale=32768.0, growth_factor=2.0, "
    "backoff_factor=0.5)",
    "create_default_amp_config": "(use_dynamic_scaling=True, dynamic_history_size=2000, initial_scale=32768.0)",
    "Config": "(values=None)",
    "Config.from_file": "(path, overrides=())",
    "Experiment": "(config, source='the config', *, own_code=True)",
    "Experiment.from_file": "(path, overrides=())",
    "Experiment.from_checkpoint": "(path, overrides=())",
    "Experiment.fit": "(self, resume=None)",
    "Experiment.evaluate": "(self)",
    "register_model": "(name)",
    "get_model": "(name)",
    "list_models": "()",
    "save_weights": "(model, path)",
    "load_weights": "(model, path, strict=True)",
}
COLLECTIVES = PROCESSES[PROCESSES.index("all_reduce") :]

# Importing PyTorch is its own affair; what follows is ours.
QUIET_IMPORT = """
import os, sys, threading
import torch.distributed
events = []
def hear(name, arguments):
    if name.startswith("socket.") or name == "_thread.start_new_thread":
        events.append(name)
class Environment(type(os.environ)):
    def __getitem__(self, name):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        if frame.f_globals["__name__"].split(".")[0] == "cyxtrain" or name in OURS:
            events.append(f"{name} read by {frame.f_globals['__name__']}")
        return super().__getitem__(name)
OURS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND",
        "DISTRIBUTED_TIMEOUT_MS", "NCCL_TIMEOUT", "OMP_NUM_THREADS"}
os.environ.__class__ = Environment
before = dict(os.environ.__dict__["_data"])
sys.addaudithook(hear)
import cyxtrain
assert events == [], events
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not torch.distributed.is_initialized()
assert os.environ.__dict__["_data"] == before
LATER = {"omegaconf", "yaml", "rich", "click", "tensorboard", "torchmetrics", "matplotlib"}
assert not LATER & sys.modules.keys(), LATER & sys.modules.keys()  # each costs time and memory: where it is used
os.environ.get("RANK"), __import__("socket").socket().close()
assert len(events) == 2, "this test must see what it looks for"
"""


def plain(function: object) -> str:
    """A signature without annotations."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def public(name: str) -> object:
    found = cx
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_public_names_are_exactly_these():
    assert sorted(cx.__all__) == sorted([*PROCESSES, *DATA, *GRADIENTS, *TRAINING, *EXPERIMENTS, *ERRORS])


def test_public_names_exist_and_star_gives_them():
    names: dict[str, object] = {}
    exec("from cyxtrain import *", names)
    assert set(cx.__all__) <= set(names)


def test_cyxtrain_distributed_has_the_same_objects():
    assert cx.distributed is cyxtrain.distributed
    assert cyxtrain.distributed.__all__ == cx.__all__
    for name in cx.__all__:
        assert getattr(cyxtrain.distributed, name) is getattr(cx, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_the_contract(name):
    assert plain(public(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "all_gather_with_grad"])  # it is ours
def test_collective_takes_the_arguments_of_torch_distributed(name):
    ours = inspect.signature(getattr(cx, name)).parameters.values()
    theirs = inspect.signature(getattr(dist, name)).parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs][: len(ours)]


def test_two_names_of_the_history_are_one_class():
    assert cx.TrainingHistory is cx.DistributedTrainingHistory


def test_every_error_is_a_cyxtrain_error():
    for name in ERRORS:
        assert issubclass(getattr(cx, name), cx.CyxtrainError)
    assert issubclass(cx.CyxtrainError, RuntimeError)
    assert issubclass(cx.ConfigError, ValueError)


def test_errors_travel_as_facts():
    error = cx.PeerLostError("rank 3 is lost", rank=3, during="all_reduce #12")
    again = error.again()
    assert type(again) is cx.PeerLostError
    assert again.to_facts() == error.to_facts()
    assert again is not error


def test_everything_public_has_a_docstring():
    bare = []
    for name in cx.__all__:
        found = getattr(cx, name)
        if not (isinstance(found, types.ModuleType) or getattr(found, "__module__", "").startswith("cyxtrain")):
            continue  # ReduceOp is PyTorch's
        bare += [] if found.__doc__ else [name]
        members = vars(found).items() if isinstance(found, type) else ()
        for member, value in members:
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                bare.append(f"{name}.{member}")
    assert bare == []


def test_import_opens_no_socket_starts_no_thread_says_nothing_and_reads_no_environment():
    ran = subprocess.run([sys.executable, "-c", QUIET_IMPORT], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_import_registers_the_ring_and_leaves_pytorchs_defaults_alone():
    assert "ring" in dist.Backend.backend_list
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def test_ring_alone_makes_a_torch_group():
    dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "ring"
        dist.barrier()
    finally:
        dist.destroy_process_group()
