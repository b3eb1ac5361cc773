"""The public names: guides write `import cyxtrain.distributed as dist`, and `import cyxtrain as cx` has the same."""

from torch.distributed import ReduceOp

from cyxtrain import callbacks, datasets, metrics
from cyxtrain.checkpoint.weights import load_weights, save_weights
from cyxtrain.config import (
    AMPConfig,
    BackendType,
    DDPConfig,
    DistributedConfig,
    DistributedTrainingConfig,
    create_default_amp_config,
)
from cyxtrain.data.sampler import DistributedBatchIterator, DistributedSampler
from cyxtrain.errors import (
    BackendUnavailableError,
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    CyxtrainError,
    DamagedFrameError,
    DistributedTrainingError,
    NonFiniteError,
    NotInitializedError,
    PeerLostError,
    PeerSilentError,
    RendezvousError,
    ReplicasDifferError,
)
from cyxtrain.experiment import Config, Experiment
from cyxtrain.models import get_model, list_models, register_model
from cyxtrain.parallel import DistributedDataParallel, all_gather_with_grad
from cyxtrain.progress.history import DistributedTrainingHistory, TrainingHistory
from cyxtrain.training.amp_trainer import DistributedAMPTrainer
from cyxtrain.training.inputs.plan import count_steps
from cyxtrain.training.outside_fit.saved_predictions import open_predictions
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.world.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from cyxtrain.world.runtime import (
    destroy_process_group,
    finalize,
    get_local_rank,
    get_rank,
    get_world_size,
    init,
    init_process_group,
    is_initialized,
    is_master,
)

# In the order in which data flow: process group, collectives, sharding, averaging, training, checkpoints; then errors.
__all__ = [  # noqa: RUF022
    "DistributedConfig",
    "BackendType",
    "init",
    "finalize",
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "get_local_rank",
    "is_master",
    "ReduceOp",
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_with_grad",
    "reduce_scatter",
    "scatter",
    "gather",
    "reduce",
    "barrier",
    "send",
    "recv",
    "datasets",
    "DistributedSampler",
    "DistributedBatchIterator",
    "DDPConfig",
    "DistributedDataParallel",
    "DistributedTrainingConfig",
    "AMPConfig",
    "create_default_amp_config",
    "DistributedTrainer",
    "DistributedAMPTrainer",
    "count_steps",
    "open_predictions",
    "callbacks",
    "metrics",
    "TrainingHistory",
    "DistributedTrainingHistory",
    "Config",
    "Experiment",
    "register_model",
    "get_model",
    "list_models",
    "save_weights",
    "load_weights",
    "CyxtrainError",
    "NotInitializedError",
    "ConfigError",
    "BackendUnavailableError",
    "RendezvousError",
    "PeerLostError",
    "PeerSilentError",
    "CollectiveTimeoutError",
    "CollectiveMismatchError",
    "DamagedFrameError",
    "CheckpointError",
    "DistributedTrainingError",
    "NonFiniteError",
    "ReplicasDifferError",
]
