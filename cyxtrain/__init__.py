"""Keras's `fit` for any PyTorch module, on as many processes as there are: exact, fast, safe.

    import cyxtrain as cx
    cx.init()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-3))
    history = trainer.fit(X, y, cx.DistributedTrainingConfig(epochs=10, batch_size=64))
    loss, accuracy = trainer.evaluate(X_test, y_test)

Importing opens no socket, starts no thread, logs nothing and reads no environment; it opens the null device in place
of a standard stream that is absent.
"""
# ruff: noqa: E402

from cyxtrain.environment import standard_streams

standard_streams.open_absent()  # before PyTorch or anything else can open a file under its number

from cyxtrain import distributed as distributed
from cyxtrain import ring
from cyxtrain.distributed import *  # noqa: F403
from cyxtrain.distributed import __all__ as __all__
from cyxtrain.notebook import run_in_workers as _run_in_workers

__version__ = "0.1.0"

ring.register()
_run_in_workers.register()
