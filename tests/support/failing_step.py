"""A callback that ends a rank in its third step."""

from __future__ import annotations

import os
import signal
from typing import Any

import cyxtrain as cx


class FailsInStep3(cx.callbacks.Callback):
    """Ends the last rank in its third step: by its own error, or by SIGKILL."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and cx.get_rank() == cx.get_world_size() - 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise KeyError("broken in step 3")
