"""A short description of what a rank is doing."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from cyxtrain.ring.wire.frames import Numbered

_LIBRARY_FOLDERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


class CurrentActivity:
    """The current position of the thread that used a group last, and the last collective of the group."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.latest: Numbered | None = None

    def describe(self) -> str:
        """Describe where the thread is and which collective it called last."""
        last_call = self._last_call()
        frame = _frames().get(self.thread)
        if frame is None:
            return f"the thread that used the group has ended; {last_call}"
        shown = _user_frame(frame) or frame
        file = Path(shown.f_code.co_filename).name
        return f"{_thread_name(self.thread)} is at {file}:{shown.f_lineno} in {shown.f_code.co_name}; {last_call}"

    def _last_call(self) -> str:
        if self.latest is None:
            return "it has called no collective yet"
        return f"the last collective it called is {self.latest.describe()}"


def _thread_name(identifier: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == identifier:
            return thread.name
    return "a thread"


def _frames() -> dict[int, FrameType]:
    """Return the current frame of each thread.

    CPython makes the frames under a lock that an ending thread needs. If garbage were collected meanwhile, and that let
    an ending thread run, both would wait for ever (seen with 3.11).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is neither ours nor PyTorch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    return frame
