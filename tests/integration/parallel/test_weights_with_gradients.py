"""Claims about the weight of a loss that travels with the gradients: no message of its own, and exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import everywhere, run_world, seeded
from markers import nightly_where
from torch import nn

import cyxtrain as cx
from cyxtrain.ring import RingProcessGroup

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, IGNORED = 12, -100


@contextlib.contextmanager
def buckets(shared: bool) -> Iterator[None]:
    """Lets ranks average gradients in shared memory, or by messages."""
    before = RingProcessGroup.make_gradient_buffers
    if not shared:
        RingProcessGroup.make_gradient_buffers = lambda _, kinds, *__: [None] * len(kinds)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RingProcessGroup.make_gradient_buffers = before  # type: ignore[method-assign]


def gradients(shared: bool, dtype: torch.dtype, weights: list[float], as_view: bool) -> tuple[bool, list[float], Any]:
    """Returns whether this rank's weight travels; how far gradients are from float64's, and the unit; the gradients."""
    rank, world_size = cx.get_rank(), cx.get_world_size()
    with buckets(shared), seeded():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        inputs = torch.randn(world_size, 5, 3, dtype=dtype)
        ddp = cx.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        unit, found = 8.0, []
        for _ in range(2):  # again, in the same memory
            model.zero_grad()
            sync = ddp.begin_sync()
            sync.divide_by(weights[rank], unit)
            (ddp(inputs[rank]).square().sum() * weights[rank] * world_size / unit).backward()
            assert ddp.is_finite()
            found = [parameter.grad.double().flatten() for parameter in model.parameters()]
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    plain.load_state_dict(model.state_dict())
    parts = [weights[each] * plain(inputs[each].double()).square().sum() for each in range(world_size)]
    (torch.stack(parts).sum() / sum(weights)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    error = (torch.cat(found) - expected).abs().max() / expected.abs().max()
    carries = ddp.carries_weights
    ddp.close()
    return carries, [float(error), float(sync.factor) * sum(weights)], torch.cat(found).numpy()


@nightly_where(lambda weights, shared, as_view: weights != [3.0, 5.0] and not (shared and as_view))
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("weights", [[3.0, 5.0], [1e-9, 7e-9], [0.1, 4e6], [0.0, 2.5], [1.1, 2.3, 3.7]])
def test_gradients_are_those_of_the_mean_over_all_ranks(weights, shared, as_view):
    for carries, (error, unit), _ in run_world(len(weights), gradients, shared, torch.float32, weights, as_view):
        assert carries
        assert error < 1e-6
        assert unit == pytest.approx(8.0, rel=1e-6)


def test_in_64_bits_they_have_the_digits_of_float64():
    for _, (error, _unit), _found in run_world(2, gradients, True, torch.float64, [1 / 3, 2 / 7], True):
        assert error < 1e-14


@pytest.mark.parametrize("weights", [[1.1, 2.3, 3.7], [0.3, 0.7]])
def test_shared_memory_and_messages_give_the_same_bits_on_every_rank(weights):
    ways = [run_world(len(weights), gradients, shared, torch.float32, weights, True) for shared in (True, False)]
    found = [gradient.tobytes() for way in ways for _, _, gradient in way]
    assert len(found) == 2 * len(weights)
    assert len(set(found)) == 1


def test_sixteen_bits_carry_no_weight():
    for found in run_world(2, narrow):
        assert found == [False, False, True]
    assert everywhere(1, narrow) == [[False, False, False]]  # alone there is nobody to ask


def narrow() -> list[bool]:
    found = []
    for model, settings in (
        (nn.Linear(3, 2).bfloat16(), {}),
        (nn.Linear(3, 2), {"compression": "bf16"}),
        (nn.Linear(3, 2), {}),
    ):
        ddp = cx.DistributedDataParallel(model, **settings)
        found.append(ddp.carries_weights)
        ddp.close()
    return found


def messages(kind: str) -> int:
    """Returns how many collectives a step makes, without shared memory."""
    with buckets(False), seeded():
        inputs, labels = torch.randn(ROWS, 3), torch.randint(0, 2, (ROWS,))
        if kind == "masked":
            labels = torch.where(torch.arange(ROWS) % 3 == 0, IGNORED, labels)
        model = nn.Linear(3, 2)
        loss: Any = (lambda output, target: (output.sum(), len(target))) if kind == "pair" else "cross_entropy"
        count = Count()
        trainer = cx.DistributedTrainer(model, loss, "sgd", callbacks=[count])
        trainer.fit(inputs, labels, epochs=1, batch_size=2, verbose=False)
    return count.found[1]


class Count(cx.callbacks.Callback):
    """Counts the all_reduces of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.made, self.before = 0, dist.all_reduce

        def counted(*given: Any, **named: Any) -> Any:
            self.made += 1
            return self.before(*given, **named)

        dist.all_reduce = counted

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        dist.all_reduce = self.before
        self.found.append(self.made)


def test_what_counts_costs_no_message():
    found = {kind: run_world(2, messages, kind) for kind in ("plain", "masked", "pair")}
    assert [*found.values()] == [[1, 1]] * 3
