"""What a rank does at the moment, in a few words."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from cyxtrain.ring.wire.frames import Numbered

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


class CurrentActivity:
    """What the thread does that used a group last.

    Attributes:
        thread: As `threading.get_ident()` names it.
        latest: The collective that the group began last; None: none yet.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.latest: Numbered | None = None

    def describe(self) -> str:
        """Returns where the thread is."""
        latest = "no collective yet" if self.latest is None else self.latest.describe()
        frame = _frames().get(self.thread)
        if frame is None:
            return f"the thread that used the group has ended; the last collective it called is {latest}"
        here = _users(frame) or frame
        name = next((other.name for other in threading.enumerate() if other.ident == self.thread), "a thread")
        place = f"{Path(here.f_code.co_filename).name}:{here.f_lineno} in {here.f_code.co_name}"
        return f"{name} is at {place}; the last collective it called is {latest}"


def _frames() -> dict[int, FrameType]:
    """Returns where each thread is.

    CPython makes the frames under a lock that a thread needs to end: if garbage were collected meanwhile, and that let
    another thread run that ends, both would wait for ever (seen with 3.11).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _users(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame that is neither ours nor PyTorch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame
