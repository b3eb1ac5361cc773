"""SyncBatchNorm with uneven micro-batches: a rank that has run out of rows computes on none.

Each forward and backward of such a layer is a collective, which all ranks must make equally often.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.sources.source import Source
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.precision import Precision
from cyxtrain.parallel import gathering_alone
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.modes import modes_kept, put_into_training
from cyxtrain.training.model.snapshot import snapshot


class EmptyBatch:
    """A forward of a model and its loss on a batch without rows, whose gradients are zeros.

    It computes in full precision: with autocast SyncBatchNorm sends float32 for 16-bit rows, but an empty batch in its
    own type.
    """

    def __init__(self, source: Source, placement: Placement, call: ModelCall, loss: Loss) -> None:
        self._batch = Batch(0, *placement.place(source.first(1).mapped(lambda tensor: tensor[:0])))
        self._device = placement.device
        self._call = copy.copy(call)
        self._call.precision = Precision("fp32", placement.device)
        self._loss = loss

    def forward(self, model: Callable[..., Any]) -> Any:
        """Return the model's output."""
        return self._call(model, self._batch)

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        """Return what to call `backward` on, 0-dim."""
        found = self._loss(self.forward(model), self._batch)
        return torch.stack([each.value for _, _, each in self._loss.terms(found)]).sum() * 0.0

    @staticmethod
    @contextlib.contextmanager
    def using_running_statistics(model: nn.Module) -> Iterator[None]:
        """Make SyncBatchNorm use its running statistics, so that no rank needs another one."""
        layers = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
        with modes_kept(*layers):
            for layer in layers:
                layer.eval()
            yield

    def problem(self, model: nn.Module, layers: Sequence[nn.Module]) -> str:
        """Return why a model cannot compute on no rows, or ""; no rank waits for another. `layers`: the shared ones."""
        loss = self._loss
        trained = [each for module in (model, *loss.modules) for each in module.parameters() if each.requires_grad]
        kept = snapshot([model, *loss.functions], self._device, copies=True)
        dtypes: set[torch.dtype] = set()
        with kept, torch.enable_grad(), gathering_alone():
            put_into_training(model, *loss.modules)
            try:
                with inputs_seen(layers, lambda tensor: dtypes.add(tensor.dtype)):
                    found = torch.autograd.grad(self(model), trained, allow_unused=True)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            made = [*filter(None.__ne__, found), *(each for each in model.buffers() if each.is_floating_point())]
            if not all(bool(torch.isfinite(each).all()) for each in made):
                return "its gradients or buffers are not finite then."
        if dtypes & {torch.float16, torch.bfloat16}:
            return "PyTorch's SyncBatchNorm sends other types for no rows than for rows of 16 bits."
        return ""


@contextlib.contextmanager
def inputs_seen(layers: Iterable[nn.Module], look: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `look` with what reaches the layers within; they evaluate, as a SyncBatchNorm would wait for other ranks."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            layer.eval()
            hook = layer.register_forward_pre_hook(lambda _, inputs: look(inputs[0]))
            stack.callback(hook.remove)
        yield
