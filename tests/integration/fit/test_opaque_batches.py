"""Claims about batches of any form, such as lists of images or graphs, in steps of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, one_process
from markers import by_night, nightly_where
from refusals import refuses
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")


ALONE = pytest.mark.usefixtures("alone")
ROWS, BATCH = 21, 8
WORLDS = [by_night(1), 2, by_night(4)]
SETTINGS: dict[str, Any] = {"epochs": 2, "effective_batch_size": BATCH, "verbose": False}


class Graphs(Dataset[Any]):
    """Graphs of 3 to 7 nodes: their features, edges and class."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        own = torch.Generator().manual_seed(number)
        nodes = int(torch.randint(3, 8, (1,), generator=own))
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=own)
        return torch.randn(nodes, 4, generator=own, dtype=torch.float64), edges, int(nodes > 5)


class Images(Dataset[Any]):
    """Images of different sizes, with 0 to 3 boxes each, in the format of torchvision's detectors."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, dict[str, Any]]:
        own = torch.Generator().manual_seed(number)
        image = torch.randn(1, 6 + number % 3, 6, generator=own, dtype=torch.float64)
        boxes = torch.rand(number % 4, 4, generator=own, dtype=torch.float64)
        return image, {"boxes": boxes, "image_id": torch.tensor(number), "file": f"{number}.png"}


def block_diagonal(samples: list[Any]) -> dict[str, Tensor]:
    nodes, edges, classes = zip(*samples, strict=True)
    counts = torch.tensor([len(each) for each in nodes])
    firsts = counts.cumsum(0) - counts
    return {
        "x": torch.cat(nodes),
        "edges": torch.cat([each + first for each, first in zip(edges, firsts, strict=True)], 1),
        "graph": torch.repeat_interleave(torch.arange(len(nodes)), counts),
        "y": torch.tensor(classes),
    }


class GraphBatch:
    """A batch of graphs as an object, as in PyTorch Geometric."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        self.parts, self.moved_to = parts, ""

    def to(self, device: Any) -> GraphBatch:
        moved = GraphBatch({name: part.to(device) for name, part in self.parts.items()})
        moved.moved_to = str(device)
        return moved


def as_object(samples: list[Any]) -> GraphBatch:
    return GraphBatch(block_diagonal(samples))


def as_lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


class GraphModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        hidden = self.inner(x).relu()
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]])
        graphs = torch.zeros(int(graph.max()) + 1, 6, dtype=x.dtype)
        scores: Tensor = self.outer(graphs.index_add(0, graph, hidden))
        return scores


class Detector(nn.Module):
    """Returns a dictionary of losses in training, and boxes otherwise, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(2, 4)

    def forward(self, images: Any, targets: Any = None) -> Any:
        found = [self.outer(torch.stack([each.mean(), each.std()])) for each in images]
        if not self.training:
            return [{"boxes": box[None]} for box in found]
        far = [(box - each["boxes"]).square().sum() for box, each in zip(found, targets, strict=True)]
        return {"loss_box": torch.stack(far).mean(), "loss_size": torch.stack(found).square().mean()}


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(3, 2)

    def forward(self, rows: Tensor, times: Tensor) -> Tensor:
        noise: Tensor = self.outer(torch.cat([rows, times[:, None].to(rows.dtype)], 1))
        return noise


def graph_loss(model: Any, batch: Any) -> Tensor:
    parts = {**(batch.parts if isinstance(batch, GraphBatch) else batch)}
    classes = parts.pop("y")
    return functional.cross_entropy(model(**parts), classes)


def detection_loss(model: Any, batch: Any) -> Tensor:
    images, targets = batch
    assert isinstance(images, tuple)
    assert targets[0]["file"].endswith(".png")
    losses = model(images, targets)
    return losses["loss_box"] + losses["loss_size"]


def noise_loss(model: Any, batch: Any) -> Tensor:
    rows, times, noise = batch
    return functional.mse_loss(model(rows, times), noise)


def noisy() -> TensorDataset:
    own = torch.Generator().manual_seed(0)
    rows, noise = torch.randn(2, ROWS, 2, generator=own, dtype=torch.float64)
    return TensorDataset(rows, torch.arange(ROWS), noise)


FORMS: dict[str, tuple[type[nn.Module], Callable[[], Any], Any, Callable[[Any, Any], Tensor]]] = {
    "graphs": (GraphModel, Graphs, block_diagonal, graph_loss),
    "objects": (GraphModel, Graphs, as_object, graph_loss),
    "boxes": (Detector, Images, as_lists, detection_loss),
    "three parts": (Denoiser, noisy, None, noise_loss),
}


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def loader(name: str, size: int = BATCH) -> DataLoader[Any]:
    _, make, collate, _ = FORMS[name]
    return DataLoader(make(), size, collate_fn=collate)


def by_hand(name: str) -> tuple[Tensor, list[float]]:
    """Train as a loop of PyTorch does; return the parameters, and the mean loss of each epoch."""
    kind, _, _, compute = FORMS[name]
    model, losses = seeded(kind), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        total = 0.0
        for number, batch in enumerate(loader(name)):
            optimizer.zero_grad()
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item() * min(BATCH, ROWS - number * BATCH)
        losses.append(total / ROWS)
    return flat(model.parameters()), losses


def fitted(name: str, **settings: Any) -> dict[str, Any]:
    kind, _, _, compute = FORMS[name]

    def train_step(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
        return compute(trainer.model, batch)

    model = seeded(kind)
    trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.05), train_step=train_step)
    history = trainer.fit(loader(name), **{**SETTINGS, **settings})
    measured = None if kind is Detector else trainer.evaluate(loader(name, 4), return_dict=True)["loss"]
    return {"parameters": flat(model.parameters()), "losses": history.train_losses, "evaluated": measured}


@nightly_where(lambda name: name not in ("graphs", "boxes"))
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", FORMS)
def test_a_step_trains_on_batches_of_any_form_as_a_loop_does_on_any_number_of_ranks(world_size, name):
    parameters, losses = by_hand(name)
    with torch.no_grad():
        model = seeded(FORMS[name][0])
        torch.nn.utils.vector_to_parameters(torch.as_tensor(parameters), model.parameters())
        expected = float(FORMS[name][3](model, next(iter(loader(name, ROWS)))))
    for found in everywhere(world_size, fitted, name):
        np.testing.assert_allclose(found["parameters"], parameters, rtol=1e-11)
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-11)
        if found["evaluated"] is not None:
            np.testing.assert_allclose(found["evaluated"], expected, rtol=1e-11)


def accumulated(name: str) -> dict[str, Any]:
    return fitted(name, accumulation_steps=2)


@pytest.mark.parametrize("name", ["boxes", by_night("graphs")])
def test_micro_batches_of_any_form_add_up_to_the_same_step(name):
    for found in everywhere(2, accumulated, name):
        np.testing.assert_allclose(found["parameters"], by_hand(name)[0], rtol=1e-11)


def detected(_: str) -> Any:
    model = seeded(Detector)
    trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.05))
    trainer.fit(loader("boxes"), **SETTINGS)
    return flat(model.parameters())


def test_a_detector_that_makes_its_own_losses_trains_on_lists_of_images_and_boxes():
    for found in everywhere(2, detected, ""):
        np.testing.assert_allclose(found, by_hand("boxes")[0], rtol=1e-11)


def predicted(_: str) -> Any:
    def predict_step(trainer: Any, batch: Any) -> Tensor:
        return torch.cat([each["boxes"] for each in trainer.model(batch[0])])

    trainer = cx.DistributedTrainer(seeded(Detector), predict_step=predict_step)
    return trainer.predict(loader("boxes", 4)).numpy()


def test_a_predict_step_gets_batches_of_any_form():
    with torch.no_grad(), one_process():
        model = seeded(Detector).eval()
        expected = torch.cat([each["boxes"] for each in model([Images()[row][0] for row in range(ROWS)])]).numpy()
    for found in everywhere(2, predicted, ""):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@ALONE
def test_a_batch_reaches_the_step_as_the_collate_fn_made_it_with_floats_of_the_models_type():
    rows, seen = [(torch.ones(2), [1, number], "text") for number in range(8)], []

    def collate(samples: list[Any]) -> dict[Any, Any]:
        floats = torch.stack([floats for floats, _, _ in samples])
        mask = torch.zeros(3, dtype=torch.uint8)
        return {0: [floats, mask], "graph": as_object([Graphs()[0]]), "samples": samples, "none": None}

    def train_step(trainer: Any, batch: Any) -> Any:
        seen.append(batch)
        return trainer.model(batch[0][0]).mean()

    trainer = cx.DistributedTrainer(nn.Linear(2, 1).double(), train_step=train_step)
    trainer.fit(DataLoader(rows, 4, collate_fn=collate), epochs=1, verbose=False)
    batch = seen[-1]
    assert [*batch] == [0, "graph", "samples", "none"]
    assert batch["none"] is None
    assert [part.dtype for part in batch[0]] == [torch.float64, torch.uint8]
    assert batch["graph"].moved_to == "cpu"
    assert [type(each) for each in batch["samples"]] == [tuple] * 4
    assert batch["samples"][3][1:] == ([1, 7], "text")


def test_a_fit_on_batches_of_any_form_resumes_with_the_same_bits(tmp_path: Path):
    with one_process():
        whole = fitted("boxes")
        fitted("boxes", epochs=1, checkpoint_dir=str(tmp_path), checkpoint_every_n_steps=2)
        (tmp_path / "latest").unlink(missing_ok=True)
        resumed = fitted("boxes", checkpoint_dir=str(tmp_path), resume="auto")
    np.testing.assert_array_equal(resumed["parameters"], whole["parameters"])


def fit_on(data: Any, loss: Any = "mse", **options: Any) -> None:
    cx.DistributedTrainer(nn.Linear(2, 2), loss, **options).fit(data, epochs=1, verbose=False)


def step(trainer: Any, batch: Any) -> Any:
    return trainer.model(batch[0]).mean()


OTHERS = TensorDataset(*torch.ones(4, 8, 2))
test_what_needs_a_row_per_sample_is_refused_with_a_way_out = refuses(
    (lambda: fit_on(loader("graphs")), "and X.'edges'. have different lengths.*train_step"),
    (lambda: fit_on(lambda: iter(loader("boxes")), train_step=step), "collate_fn pad.*DataLoader over a"),
    (
        lambda: fit_on(TensorDataset(*OTHERS.tensors[:3])),
        r"third part of a batch is the weight .* the shape \[2, 2\]: .*nest it.*train_step",
    ),
    (lambda: fit_on(OTHERS), "has 4 parts.*train_step"),
    (
        lambda: cx.DistributedTrainer(nn.Linear(2, 2), train_step=step).fit(OTHERS, class_weight={0: 1.0}),
        "class_weight needs one class number per sample",
    ),
    (lambda: fit_on(OTHERS, train_step=lambda trainer, batch: type(trainer).train_step(trainer, batch)), "has 4 parts"),
    (
        lambda: cx.DistributedTrainer(seeded(Detector)).predict(loader("boxes")),
        r"output\[0\]\['boxes'\]. Let a predict_step pad the entries",
    ),
)


@ALONE
def test_four_parts_reach_a_step_as_they_are():
    fit_on(OTHERS, train_step=lambda trainer, batch: trainer.model(batch[3]).mean() * len(batch) / 4)


@ALONE
def test_nan_in_a_batch_of_any_form_is_named_with_the_rows_of_the_batch():
    rows = [(torch.full((3,), float("nan") if number == 5 else 1.0), number) for number in range(8)]

    def train_step(trainer: Any, batch: Any) -> Any:
        return torch.stack([trainer.model(each).sum() for each in batch[0]]).mean()

    trainer = cx.DistributedTrainer(nn.Linear(3, 2), train_step=train_step)
    data = DataLoader(rows, 4, collate_fn=lambda samples: [[row for row, _ in samples], ["text"]])
    with pytest.raises(cx.NonFiniteError, match=r"holds NaN or infinities \(samples 4, 5, 6, 7\)"):
        trainer.fit(data, epochs=1, verbose=False)


@ALONE
@pytest.mark.parametrize("wrap", [lambda ids: ids, Tensor.numpy, lambda ids: (ids, None)])
def test_validation_data_without_y_are_given_as_x_is(wrap):
    ids = torch.arange(40).reshape(10, 4) % 7

    def train_step(trainer: Any, batch: Any) -> Tensor:
        (own,) = batch
        return functional.cross_entropy(trainer.model(own[:, :-1]).transpose(1, 2), own[:, 1:])

    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    trainer = cx.DistributedTrainer(model, None, "sgd", train_step=train_step)
    history = trainer.fit(ids, validation_data=wrap(ids), epochs=1, verbose=False)
    assert history.history["val_loss"] == [pytest.approx(trainer.evaluate(ids, return_dict=True)["loss"])]


class StepsOverGraphs(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> Tensor:
        return graph_loss(self.model, batch)


@pytest.mark.nightly
def test_workers_of_a_notebook_do_the_same():
    model = seeded(GraphModel)
    trainer = StepsOverGraphs(model, None, torch.optim.SGD(model.parameters(), 0.05))
    try:
        trainer.fit(loader("graphs"), num_processes=2, **SETTINGS)
    finally:
        cx.finalize()
    np.testing.assert_allclose(flat(model.parameters()), by_hand("graphs")[0], rtol=1e-11)
