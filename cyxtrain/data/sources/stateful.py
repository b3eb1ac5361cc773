"""torchdata's StatefulDataLoader over a Dataset with a length: a DataLoader, whose position `fit` keeps itself."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from cyxtrain.errors import ConfigError

_MODULE = "torchdata.stateful_dataloader"
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def as_plain_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a DataLoader of the same samples for a StatefulDataLoader of a Dataset; other loaders as they are.

    Raises ConfigError if a state has been loaded into it: a checkpoint of `fit` has the position of each rank.
    """
    # Nobody has one who has not imported it.
    stateful: Any = sys.modules.get(_MODULE)
    if stateful is None or type(loader) is not stateful.StatefulDataLoader:
        return loader
    given: Any = loader
    if given.batch_sampler is None or isinstance(given.dataset, IterableDataset):
        return loader
    if given.next_iter_state is not None:
        raise ConfigError(
            "X is a StatefulDataLoader with a loaded state, and a checkpoint of fit has its own position in the data: "
            'give a new loader, and fit(resume="auto"), which continues in the middle of an epoch.'
        )
    settings = {name: getattr(given, name) for name in _SETTINGS}
    batches = given.batch_sampler
    if type(batches) is not sys.modules[f"{_MODULE}.sampler"].BatchSampler:
        return DataLoader(given.dataset, batch_sampler=batches, **settings)
    sampler = _as_plain_sampler(batches.sampler, given.generator)
    return DataLoader(
        given.dataset, batch_size=batches.batch_size, sampler=sampler, drop_last=batches.drop_last, **settings
    )


def _as_plain_sampler(sampler: Any, generator: Any) -> Any:
    """Return PyTorch's RandomSampler for torchdata's; other samplers as they are."""
    if type(sampler) is not sys.modules[f"{_MODULE}.sampler"].RandomSampler:
        return sampler
    return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator)
