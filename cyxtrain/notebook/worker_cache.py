"""Keep workers between calls, as long as new ones would be the same."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping

import torch

from cyxtrain.config import BackendType, requested_backend
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError, counted, shortened, warn
from cyxtrain.notebook.pool import Pool
from cyxtrain.training.delegation import TrainerParts
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.workers.machine import usable_cores
from cyxtrain.world import runtime


class Workers:
    """The workers of this process; there is one pool at a time."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._variables: dict[str, str] = {}
        self._sources: dict[str, int] = {}
        self._is_registered = False
        self._one_at_a_time = threading.Lock()
        self._user = 0

    @contextlib.contextmanager
    def used_for(self, method: str) -> Iterator[None]:
        """Reserve them for this thread; raise ConfigError if it uses them already."""
        # Asked before the lock, for which this thread would wait for ever.
        if self._user == threading.get_ident():
            raise ConfigError(
                f"{method} was called by a callback that stays in the notebook while the workers are busy with a call. "
                "Call it afterwards, or use distributed=False for evaluate and predict, which then run here with the "
                "weights from before that call."
            )
        with self._one_at_a_time:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = 0

    def pool(self, count: int, trainer: DistributedTrainer) -> tuple[Pool, str]:
        """Return workers equal to new ones, and why they have been started, or "" if they existed."""
        variables = process_env.to_pass_on()
        if accelerator.visible() is not None and not is_on_gpu(trainer):
            variables.setdefault("DISTRIBUTED_BACKEND", "cpu")  # otherwise the workers would use NCCL
        sources = _own_sources()
        why = ""
        pool = self._pool
        if pool is not None:
            why = self._why_not(pool, count, variables, sources)
        if pool is None or why:
            self.end()
            self._end_with_process()
            cores = usable_cores(variables)
            if count > cores and not is_on_gpu(trainer):
                warn(f"num_processes={count}, but this process may use {counted(cores, 'core')}: workers share them.")
            pool = Pool(count, variables)
            self._pool = pool
            self._variables = variables
            self._sources = {}
            pool.start()
            why = f"{count} processes are starting{why}; they stay for the next calls"
        self._sources |= sources
        return pool, why

    def _end_with_process(self) -> None:
        if self._is_registered:
            return
        self._is_registered = True
        runtime.before_leaving(self.end)
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=self.abandon)

    def _why_not(self, pool: Pool, count: int, variables: Mapping[str, str], sources: Mapping[str, int]) -> str:
        """Return why existing workers cannot be used, or "" if they can."""
        if not pool.is_usable:
            return ", because the previous ones have exited"
        if pool.num_processes != count:
            return f", because there were {pool.num_processes}"
        edited = [name for name, time in self._sources.items() if sources.get(name, time) != time]
        if edited:
            return f", because {shortened(edited)} was edited: reload it here too (importlib.reload)"
        changed = dict.fromkeys(name for name, _ in sorted(variables.items() ^ self._variables.items()))
        if changed:
            return f", because the environment has changed: {shortened(changed)}"
        return ""

    def end(self) -> None:
        """End them, if there are any."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.close()

    def abandon(self) -> None:
        """Release them in a forked child: they belong to its parent."""
        self._one_at_a_time = threading.Lock()  # another thread of the parent may hold it
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.abandon()


def _own_sources() -> dict[str, int]:
    """Return when each imported file was modified, except files of installed packages."""
    # A worker has imported its own copy of each: it would run the code from before an edit.
    installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(torch.__file__)})
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(installed) and "site-packages" not in file:
            try:
                found[file] = os.stat(file).st_mtime_ns
            except OSError:  # deleted since it was imported
                continue
    return found


def is_on_gpu(trainer: DistributedTrainer) -> bool:
    """Return whether a trainer's workers use accelerators."""
    device = TrainerParts.of(trainer).given.device
    if device != "auto":
        return accelerator.is_accelerator(torch.device(device))
    parameter = next(trainer.model.parameters(), None)
    if parameter is not None and accelerator.is_accelerator(parameter.device):
        return True
    return accelerator.visible() is not None and requested_backend() in (None, BackendType.NCCL)


workers = Workers()
