"""Claims about num_threads: PyTorch's threads in a fit, and in the evaluations and predictions after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, one_process
from torch import Tensor, nn

import cyxtrain as cx


class Noting(nn.Module):
    """Notes PyTorch's threads in each forward but those of trials, which have two samples outside of training."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self.body = make_model()
        self.note = note

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > 2:
            self.note(torch.get_num_threads())
        scores: Tensor = self.body(inputs)
        return scores


def threads_in(**settings: Any) -> list[set[int]]:
    """Returns the numbers of threads in training and validation, in evaluate, in predict, and afterwards."""
    seen: list[int] = []
    model = Noting(seen.append)
    rows = make_rows(12)
    callback = cx.callbacks.LambdaCallback(on_train_begin=lambda logs=None: seen.clear())
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    more = {"validation_data": rows, "callbacks": [callback], "verbose": False}
    trainer.fit(*rows, epochs=1, batch_size=4, **more, **settings)
    found = [{*seen}]
    for call in (lambda: trainer.evaluate(*rows), lambda: trainer.predict(rows[0])):
        seen.clear()
        call()
        found.append({*seen})
    return [*found, {torch.get_num_threads()}]


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, 2), ({"num_threads": 1}, 1), ({"num_threads": 3}, 3), ({"virtual_ranks": 1}, 1)]
)
def test_a_fit_and_what_follows_compute_with_the_threads_of_its_setting(settings, expected):
    with one_process():
        torch.set_num_threads(2)  # `one_process` puts back what was before
        assert threads_in(**settings) == [{expected}, {expected}, {expected}, {2}]
