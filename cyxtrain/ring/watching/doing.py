"""What a thread does at the moment, in a few words."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


def doing(thread: int, latest: str) -> str:
    """Returns where a thread is.

    Args:
        thread: As `threading.get_ident()` names it.
        latest: The last collective that it was in.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return f"the thread that called {latest} has ended"
    here = _users(frame) or frame
    name = next((other.name for other in threading.enumerate() if other.ident == thread), "a thread")
    place = f"{Path(here.f_code.co_filename).name}:{here.f_lineno} in {here.f_code.co_name}"
    return f"{name} is at {place}; the last collective it called is {latest}"


def _users(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame that is neither ours nor PyTorch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame
