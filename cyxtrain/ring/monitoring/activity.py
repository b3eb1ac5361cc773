"""A short description of what a rank is doing."""

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
    """The current position of the thread that used a group last, and the last collective of the group."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.latest: Numbered | None = None

    def describe(self) -> str:
        """Return the position of the thread, in words."""
        latest = "no collective yet" if self.latest is None else self.latest.describe()
        frame = _frames().get(self.thread)
        if frame is None:
            return f"the thread that used the group has ended; the last collective it called is {latest}"
        shown = _user_frame(frame) or frame
        name = next((other.name for other in threading.enumerate() if other.ident == self.thread), "a thread")
        place = f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}"
        return f"{name} is at {place}; the last collective it called is {latest}"


def _frames() -> dict[int, FrameType]:
    """Return the current frame of each thread.

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


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is neither ours nor PyTorch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame
