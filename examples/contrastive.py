"""A step with a loss over pairs of all ranks: SimCLR learns features of digits without labels (Chen et al., 2020).

Run it alone, or on two ranks:

    python examples/contrastive.py
    cyxtrain launch -n 2 -- python examples/contrastive.py

Each picture is shifted twice by a pixel or less. The two views of a picture should be more similar than views of
different pictures in the batch. `cx.all_gather_with_grad` returns the views of all ranks, so each view is compared with
the same number of others on two ranks as on one. Expect the loss to fall. A linear classifier trained on 50 labels then
has a higher test accuracy on the features than on the pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.datasets import load_digits

TEMPERATURE, EPOCHS, LABELS = 0.2, 15, 50


def shifted(images: Tensor) -> Tensor:
    """Return each picture, shifted by -1, 0 or 1 pixel in both directions."""
    padded = functional.pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    rows, columns = torch.randint(3, (2, len(images), 1)) + torch.arange(8)
    return padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]].flatten(1)


def contrast(trainer: Any, batch: Any) -> Tensor:
    """Return the loss of a batch of pictures, which has no labels."""
    (images,), model = batch, trainer.model
    views = (functional.normalize(model.projection(model.encoder(shifted(images))), dim=1) for _ in range(2))
    first, second = map(cx.all_gather_with_grad, views)  # of all ranks, with gradients
    similarity = (both := torch.cat([first, second])) @ both.T / TEMPERATURE
    similarity.fill_diagonal_(float("-inf"))  # a view is not compared with itself
    other_view = torch.arange(len(both)).roll(len(first))
    return functional.cross_entropy(similarity, other_view)


def features_of(trainer: Any, batch: Any) -> Tensor:
    """Return the features of pictures."""
    return 8 * functional.normalize(trainer.model.encoder(batch[0]), dim=1)


def main() -> None:
    (x_train, y_train), (x_test, y_test) = load_digits()
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
    model = nn.ModuleDict({"encoder": encoder, "projection": nn.Linear(128, 64)})
    settings: Any = {"scheduler": "cosine", "train_step": contrast, "predict_step": features_of}
    trainer = cx.DistributedTrainer(model, None, torch.optim.Adam(model.parameters(), lr=0.002), **settings)
    history = trainer.fit(x_train, epochs=EPOCHS, effective_batch_size=128, verbose=False)

    x_test = shifted(torch.from_numpy(x_test)).numpy()
    features = [trainer.predict(images) for images in (x_train, x_test)]
    accuracies = [classify(*given, y_train, y_test) for given in (features, (x_train, x_test))]
    if cx.is_master():
        print("loss", *(f"{loss:.2f}" for loss in history.train_losses[::3]), f"... {history.train_losses[-1]:.2f}")
        print(f"test accuracy with {LABELS} labels: {accuracies[0]:.4f} on features, {accuracies[1]:.4f} on pixels")


def classify(train: np.ndarray, test: np.ndarray, y_train: np.ndarray, y_test: np.ndarray) -> float:
    """Return the accuracy of a linear classifier that is trained on few labels."""
    torch.manual_seed(0)
    classifier = nn.Linear(train.shape[1], 10)
    trainer = cx.DistributedTrainer(classifier, "cross_entropy", torch.optim.Adam(classifier.parameters(), lr=0.02))
    trainer.fit(train[:LABELS], y_train[:LABELS], epochs=100, effective_batch_size=LABELS, verbose=False)
    return trainer.evaluate(test, y_test).accuracy


if __name__ == "__main__":
    with cx.init():
        main()
