"""Workers that are kept from call to call, as long as they are what ones that start now would be."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping

import torch

from cyxtrain.config import BackendType
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError, counted, shortened, warn
from cyxtrain.notebook.pool import Pool
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.workers.machine import usable_cores
from cyxtrain.world import runtime


class Workers:
    """The workers of this process, of which there is one set at a time."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._variables: dict[str, str] = {}
        self._sources: dict[str, int] = {}
        self._is_heard = False
        self._one_at_a_time = threading.Lock()
        self._user = 0

    @contextlib.contextmanager
    def used_for(self, method: str) -> Iterator[None]:
        """Within, this thread has them for itself.

        Raises:
            ConfigError: It has them already: a callback that has stayed in the notebook makes a call.
        """
        if self._user == threading.get_ident():
            raise ConfigError(
                f"{method} was called by a callback that stays in the notebook, while the workers are in the middle of "
                "a call: it can have them afterwards. With distributed=False evaluate and predict need none, and have "
                "the weights from before that call."
            )
        with self._one_at_a_time:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = 0

    def pool(self, count: int, trainer: DistributedTrainer) -> tuple[Pool, str]:
        """Returns workers that are as if they had just been started, and why they have been; "": they were there."""
        variables, sources = process_env.to_pass_on(), _own_sources()
        if accelerator.visible() is not None and not is_on_gpu(trainer):
            variables.setdefault("DISTRIBUTED_BACKEND", "cpu")  # else the workers would connect their GPUs
        pool, why = self._pool, self._why_others(count, variables, sources)
        if pool is None or why:
            self.end()
            if not self._is_heard:
                self._is_heard = True
                runtime.before_leaving(self.end)
                if sys.platform != "win32":
                    os.register_at_fork(after_in_child=self.abandon)
            cores = usable_cores(variables)
            if count > cores and not is_on_gpu(trainer):
                warn(f"num_processes={count}, and this process may use {counted(cores, 'core')}: they share them.")
            self._pool = pool = Pool(count, variables)
            self._variables, self._sources = variables, {}
            pool.start()
            why = f"{count} processes are starting{why}; they stay for the next calls"
        self._sources |= sources
        return pool, why

    def _why_others(self, count: int, variables: Mapping[str, str], sources: Mapping[str, int]) -> str:
        """Returns why the workers that are there cannot be used; "": they can, or there are none."""
        pool = self._pool
        if pool is None:
            return ""
        changed = [name for name, _ in sorted(variables.items() ^ self._variables.items())]
        edited = [name for name, time in self._sources.items() if sources.get(name, time) != time]
        if not pool.is_usable:
            return ", because the earlier ones have ended"
        if pool.num_processes != count:
            return f", because there were {pool.num_processes}"
        if edited:
            return f", because {shortened(edited)} was edited: reload it here, too (importlib.reload)"
        return f", because the environment has another {shortened(dict.fromkeys(changed))}" if changed else ""

    def end(self) -> None:
        """Ends them, where there are any."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def abandon(self) -> None:
        """Forgets them, in a forked child: they are its parent's."""
        self._one_at_a_time = threading.Lock()  # another thread may have had it
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.abandon()


def _own_sources() -> dict[str, int]:
    """Returns when each imported file that belongs to no installed package was last written to.

    A worker has imported its own copy; where one has been edited since, it is not what the notebook has.
    """
    installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(torch.__file__)})
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(installed) and "site-packages" not in file:
            try:
                found[file] = os.stat(file).st_mtime_ns
            except OSError:
                continue
    return found


def is_on_gpu(trainer: DistributedTrainer) -> bool:
    """Returns whether a trainer's workers compute on GPUs or their like."""
    device, parameter = trainer._device, next(trainer.model.parameters(), None)
    if device != "auto":
        return accelerator.is_accelerator(torch.device(device))
    if parameter is not None and accelerator.is_accelerator(parameter.device):
        return True
    return accelerator.visible() is not None and process_env.backend() in (None, BackendType.NCCL)


workers = Workers()
