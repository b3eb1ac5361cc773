"""One rank of `fit_vs_peers.py`: the same work, written as each library wants it written.

Every way trains a model on rows of synthetic data, in batches of 64 per rank, with Adam and one thread, and knows at
the end of each epoch its mean loss and accuracy (skorch: the loss alone), summed in tensors: no way logs, draws bars or
saves anything. Over several ranks each has PyTorch's DDP on Gloo, as it comes, and DistributedSampler or its like.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import launches
import torch
import torch.distributed as dist
from fit_work import BATCH, LEARNING_RATE, MODELS, make_data
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Data = tuple[Tensor, Tensor]
Train = Callable[[str, nn.Module, Data, int], None]
"""Trains a model of a name on data for so many epochs."""

# Read now: Lightning takes them out of the environment.
WORLD_SIZE, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
_WARM_ROWS = 10 * BATCH
_TEST_ROWS = 4096


class Sums:
    """Loss and right answers of an epoch, without asking for them in each step."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float]] = []
        self._reset()

    def _reset(self) -> None:
        self._loss, self._correct, self._rows = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0

    def add(self, loss: Tensor, output: Tensor, targets: Tensor) -> None:
        """Counts a batch."""
        self._loss += loss.detach() * len(targets)
        self._correct += (output.argmax(1) == targets).sum()
        self._rows += len(targets)

    def end_epoch(self) -> None:
        """Notes the means, over all ranks."""
        sums = torch.stack([self._loss, self._correct.float(), torch.tensor(float(self._rows))])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        loss, correct, rows = sums.tolist()
        self.history.append((loss / rows, correct / rows))
        self._reset()


def adam(model: nn.Module, **fields: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), LEARNING_RATE, **fields)


def loader_of(data: Data) -> DataLoader[Any]:
    """What everybody writes."""
    rows = TensorDataset(*data)
    if WORLD_SIZE == 1:
        return DataLoader(rows, batch_size=BATCH, shuffle=True)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, WORLD_SIZE, RANK)
    return DataLoader(rows, batch_size=BATCH, sampler=sampler)


def epochs_of(loader: DataLoader[Any], epochs: int) -> Iterator[DataLoader[Any]]:
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield loader


def wrapped(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if WORLD_SIZE > 1 else model


# --- the ways -------------------------------------------------------------------------------------------------------


def by_hand(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    optimizer, sums, ddp = adam(model), Sums(), wrapped(model)
    for loader in epochs_of(loader_of(data), epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            output = ddp(inputs)
            loss = functional.cross_entropy(output, targets)
            loss.backward()
            optimizer.step()
            sums.add(loss, output, targets)
        sums.end_epoch()


def by_hand_tuned(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    """The best loop that we know how to write: rows gathered by index, the fused optimizer. Each rank has its rows."""
    optimizer, sums = adam(model, fused=True), Sums()
    for _ in range(epochs):
        for rows in torch.randperm(len(data[0]))[RANK::WORLD_SIZE].split(BATCH):
            inputs, targets = data[0].index_select(0, rows), data[1].index_select(0, rows)
            optimizer.zero_grad()
            output = model(inputs)
            loss = functional.cross_entropy(output, targets)
            loss.backward()
            optimizer.step()
            sums.add(loss, output, targets)
        sums.end_epoch()


def by_cyxtrain(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    import cyxtrain as cx

    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    history = trainer.fit(*data, epochs=epochs, batch_size=BATCH, verbose=False)
    assert len(history.train_accuracies) == epochs


def by_accelerate(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    from accelerate import Accelerator

    accelerator, sums = Accelerator(cpu=True), Sums()
    loader: Any = DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            output = prepared(inputs)
            loss = functional.cross_entropy(output, targets)
            accelerator.backward(loss)
            optimizer.step()
            sums.add(loss, output, targets)
        sums.end_epoch()


def by_ignite(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    from ignite.engine import Engine, Events, create_supervised_trainer

    sums, loader = Sums(), loader_of(data)

    def note(inputs: Tensor, targets: Tensor, output: Tensor, loss: Tensor) -> None:
        sums.add(loss, output, targets)

    engine = create_supervised_trainer(wrapped(model), adam(model), functional.cross_entropy, output_transform=note)

    @engine.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(engine.state.epoch - 1)

    engine.add_event_handler(Events.EPOCH_COMPLETED, sums.end_epoch)
    engine.run(loader, max_epochs=epochs)


def by_lightning(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    import logging
    import warnings

    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.sums = model, Sums()

        def training_step(self, batch: Data, number: int) -> Tensor:
            output = self.model(batch[0])
            loss = functional.cross_entropy(output, batch[1])
            self.sums.add(loss, output, batch[1])
            return loss

        def on_train_epoch_end(self) -> None:
            self.sums.end_epoch()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.model)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=DDPStrategy(process_group_backend="gloo") if WORLD_SIZE > 1 else "auto",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True))


def by_skorch(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    from skorch import NeuralNetClassifier

    kind: Any = NeuralNetClassifier
    more: dict[str, Any] = {}
    if WORLD_SIZE > 1:
        from accelerate import Accelerator
        from skorch.hf import AccelerateMixin

        kind = type("Net", (AccelerateMixin, NeuralNetClassifier), {"__module__": __name__})
        more = {"accelerator": Accelerator(cpu=True), "callbacks__print_log__sink": lambda text: None}
    else:
        more = {"callbacks__print_log": None}
    net = kind(
        model,
        criterion=lambda: functional.cross_entropy,  # Accelerate would wrap a module in DDP, which wants parameters
        optimizer=torch.optim.Adam,
        lr=LEARNING_RATE,
        batch_size=BATCH,
        max_epochs=epochs,
        iterator_train__shuffle=True,
        train_split=None,
        **more,
    )
    net.fit(*data)


def by_keras(name: str, model: nn.Module, data: Data, epochs: int) -> None:
    """Keras has its own layers; the weights that they begin with are those of the model."""
    import keras

    layers = {
        "mlp": lambda: dense(256, 10),
        "large mlp": lambda: dense(1536, 1536, 512, 10),
        "convnet": lambda: [
            keras.layers.Reshape((28, 28, 1)),
            *(
                layer
                for channels in (8, 16)
                for layer in (
                    keras.layers.Conv2D(channels, 3, padding="same", activation="relu"),
                    keras.layers.MaxPooling2D(2),
                )
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ],
    }

    def dense(*widths: int) -> list[Any]:
        *hidden, last = widths
        return [*(keras.layers.Dense(width, activation="relu") for width in hidden), keras.layers.Dense(last)]

    net = keras.Sequential([keras.Input((784,)), *layers[name]()])
    net.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    first = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: note_first_step())
    net.fit(data[0].numpy(), data[1].numpy(), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[first])
    model.forward = lambda inputs: net(inputs)  # type: ignore[method-assign] - what is evaluated is what was trained


WAYS: dict[str, Train] = {
    "by hand": by_hand,
    "by hand, tuned": by_hand_tuned,
    "tuned, apart": by_hand_tuned,
    "cyxtrain": by_cyxtrain,
    "Accelerate": by_accelerate,
    "Ignite": by_ignite,
    "Lightning": by_lightning,
    "skorch": by_skorch,
    "Keras": by_keras,
}
_NEED_A_GROUP = ("by hand", "tuned, apart", "Accelerate", "Ignite", "skorch")

# --- one rank -------------------------------------------------------------------------------------------------------

_first_step: list[float] = []


def note_first_step(*_: Any) -> None:
    """Notes how long after the start of this process the first step was taken."""
    if not _first_step:
        _first_step.append(time.time() - float(os.environ["LAUNCHED_AT"]))


def accuracy_of(model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].make()


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    train, name = WAYS[task["way"]], task["model"]
    work = MODELS[name]
    if task["way"] == "Keras":
        os.environ["KERAS_BACKEND"] = "torch"
    hook = register_optimizer_step_post_hook(note_first_step)
    data = make_data(work.rows)
    if WORLD_SIZE > 1 and task["way"] in _NEED_A_GROUP:
        dist.init_process_group("gloo")
    train(name, fresh(name), (data[0][:_WARM_ROWS], data[1][:_WARM_ROWS]), 1)
    hook.remove()
    model = fresh(name)
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    train(name, model, data, work.epochs)
    seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {
        "seconds": seconds,
        "first_step_seconds": _first_step[0],
        "peak_bytes": peak_bytes,
        "accuracy": accuracy_of(model, make_data(_TEST_ROWS, seed=1)),
    }
    launches.report(found)


if __name__ == "__main__":
    main()
