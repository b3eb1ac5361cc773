"""Python that PyTorch's compiler is to leave alone: what C++ calls in the middle of a compiled program."""

from __future__ import annotations

import types

import torch

from cyxtrain.environment import torch_compat


def skip_dynamo(cls: type) -> None:
    """Keeps the compiler away from a class's methods, and from all that they call.

    `torch.compiler.disable` does the same, but imports the whole compiler, which costs seconds.
    """
    for name, member in [*vars(cls).items()]:
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType) and not torch_compat.skip_compiling(function):
            disabled = torch.compiler.disable(function)
            setattr(cls, name, property(disabled) if isinstance(member, property) else disabled)
