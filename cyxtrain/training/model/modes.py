"""Training and evaluation modes of modules, which are the user's and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from cyxtrain.errors import shortened


def put_into_training(*modules: nn.Module) -> Callable[[], None]:
    """Put modules that are in evaluation mode into training mode, with all their parts.

    A module in training mode is not changed: its parts in evaluation mode, such as a frozen batch norm, are the user's
    choice. A model in evaluation mode is one as `from_pretrained` returns it. The returned function, called before each
    epoch, undoes an `eval()` of a whole module in between.
    """
    for module in modules:
        if not module.training:
            module.train()
    modes = [(module, [(part, part.training) for part in module.modules()]) for module in modules]

    def put_back() -> None:
        for module, parts in modes:
            if not module.training:
                module.train()
                for part, mode in parts:
                    part.training = mode

    return put_back


def explain_modes(model: nn.Module) -> str:
    """Describe in which modes a model is trained; "": in training mode."""
    if not model.training:
        return "the model is in evaluation mode, as from_pretrained returns it, and is trained in training mode"
    parts = [name for name, part in model.named_modules() if not part.training]
    outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
    how = "model.train() before fit changes that"
    return f"training, but {shortened(outermost)} in evaluation mode, as given; {how}" if outermost else ""


@contextlib.contextmanager
def modes_kept(*modules: nn.Module) -> Iterator[None]:
    """Restore the mode of every module within `modules` afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
