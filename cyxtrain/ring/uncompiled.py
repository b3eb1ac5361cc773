"""Python that PyTorch's compiler is to leave alone: what C++ calls in the middle of a compiled program."""

from __future__ import annotations

import types

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(cls: type) -> None:
    """Keeps the compiler away from a class's methods, and from all that they call.

    `torch.compiler.disable` would do the same, but imports the whole compiler, which costs seconds.
    """
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType):
            set_code_exec_strategy(function.__code__, _SKIP)
