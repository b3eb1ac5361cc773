"""What the server of `rank_processes` imports once, for all the processes that it forks."""

from __future__ import annotations

import gc
import importlib

gc.disable()  # all of it stays: each collection would search it in vain, a second altogether
# Optimizers import the last one when they first step.
for module in ("cyxtrain", "pytest", "torch.testing._comparison", "sklearn.metrics", "torchmetrics", "torch._dynamo"):
    importlib.import_module(module)
gc.freeze()  # a collection in a rank would touch, and so copy, all of this memory: 0.3 s
gc.enable()
