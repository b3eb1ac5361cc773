"""Claims about tables as X and y: the bits of the arrays on any number of ranks, and refusals on every rank alike."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, adam, everywhere, fingerprint, make_model, make_rows, one_process, run_world, seeded
from lazy import LazyModule
from markers import by_night
from refusals import ending, refusal, warning_texts
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint, write_checkpoint

pandas: Any = LazyModule("pandas", optional=True)
pytestmark = pytest.mark.usefixtures("rank_server")

INPUTS, TARGETS = (rows.numpy() for rows in make_rows(23))
NAMES = ["area", "rooms", "age", "floor"]
FIT: dict[str, Any] = {"epochs": 2, "effective_batch_size": 6, "verbose": False}


@pytest.fixture(scope="module", autouse=True)
def started_polars(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Starts Polars' engine before a test counts descriptors: it keeps one from its first file on."""
    if importlib.util.find_spec("polars") is None:
        return
    polars: Any = importlib.import_module("polars")
    file = tmp_path_factory.mktemp("polars") / "one.parquet"
    polars.DataFrame({"one": [1]}).write_parquet(file)
    polars.scan_parquet(file).collect(engine="streaming")


class WithCodes(nn.Module):
    """Numbers, and codes for an embedding, as two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.last = nn.Linear(4 + 3, CLASSES)

    def forward(self, numbers: Tensor, city: Tensor) -> Tensor:
        return self.last(torch.cat([numbers, self.words(city)], dim=1))


def make_table(library: str, columns: dict[str, Any]) -> Any:
    module: Any = importlib.import_module(library)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


def bits(inputs: Any, targets: Any, loss_fn: str = "cross_entropy", **settings: Any) -> tuple[str, Any, Any]:
    """Returns the weights after a fit, the history, and predictions."""
    with seeded():
        model: nn.Module = WithCodes() if isinstance(inputs, dict) else make_model(outputs=settings.pop("outputs", 3))
    trainer = cx.DistributedTrainer(model, loss_fn, adam(model))
    history = trainer.fit(inputs, targets, **FIT, **settings)
    loss, accuracy = trainer.evaluate(inputs, targets)
    predicted = trainer.predict(inputs)
    assert isinstance(predicted, np.ndarray)
    return fingerprint(model), [history.train_losses, history.val_losses, loss, accuracy], predicted.tobytes()


def train_both(library: str, folder: str) -> dict[str, bool]:
    """Returns whether each kind of table has the bits of the array, on this rank."""
    floats = dict(zip(NAMES, INPUTS.T, strict=True))
    mixed = {"area": INPUTS[:, 0], "rooms": TARGETS.astype("int16"), "new": TARGETS > 0, "age": TARGETS / 3}
    stacked = np.column_stack([mixed["area"], mixed["rooms"], mixed["new"], mixed["age"]])
    assert stacked.dtype == np.float64
    several = {"X": floats, "y": {"class": TARGETS}, "price": {"price": INPUTS[:, 0]}, "mixed": mixed}
    table = {name: make_table(library, columns) for name, columns in several.items()}
    classes = table["y"]["class"]
    weights = make_table(library, {"weight": np.arange(23.0)})["weight"]
    codes = TARGETS + 1
    parts = {"numbers": table["X"], "city": make_table(library, {"city": codes})["city"]}
    arrays = bits(INPUTS, TARGETS)
    price = INPUTS[:, :1]
    found = {
        "floats and classes": bits(table["X"], classes) == arrays,
        "mixed types": bits(table["mixed"], classes) == bits(stacked, TARGETS),
        "booleans as classes": bits(table["X"], table["mixed"]["new"]) == bits(INPUTS, TARGETS > 0),
        "one column as y": bits(table["X"], table["price"], "mse", outputs=1) == bits(INPUTS, price, "mse", outputs=1),
        "several inputs": bits(parts, classes) == bits({"numbers": INPUTS, "city": codes}, TARGETS),
        "weights": bits(table["X"], classes, sample_weight=weights)
        == bits(INPUTS, TARGETS, sample_weight=np.arange(23.0)),
        "validation": bits(table["X"], classes, validation_data=(table["X"], classes, weights))
        == bits(INPUTS, TARGETS, validation_data=(INPUTS, TARGETS, np.arange(23.0))),
        "held out": bits(table["X"], classes, validation_split=0.3, validation_stratify=True)
        == bits(INPUTS, TARGETS, validation_split=0.3, validation_stratify=True),
    }
    if library == "pandas":
        nullable = (table["X"].convert_dtypes(), classes.astype("Int64"))
        found["nullable types"] = bits(*nullable) == arrays
        shuffled = table["X"].sample(frac=1.0, random_state=0)
        rows = shuffled.index.to_numpy()
        found["another order"] = bits(shuffled, classes.loc[rows]) == bits(INPUTS[rows], TARGETS[rows])
    if library == "polars":
        found |= train_queries(folder, arrays, bits(INPUTS, price, "mse", outputs=1))
    return found


def train_queries(folder: str, arrays: Any, prices: Any) -> dict[str, bool]:
    """As `train_both`, for queries of a file."""
    polars: Any = importlib.import_module("polars")
    file = polars.scan_parquet(f"{folder}/rows.parquet")
    features = file.select(NAMES)
    classes = file.select("class").collect()["class"]
    return {
        "a query": bits(features, classes) == arrays,
        "a query as y": bits(features, file.select("area"), "mse", outputs=1) == prices,
    }


@pytest.mark.parametrize("world_size", [by_night(1), 2])
@pytest.mark.parametrize("library", ["pandas", by_night("polars"), by_night("pyarrow")])
def test_tables_train_the_model_of_the_arrays_bit_for_bit(library, world_size, tmp_path):
    module: Any = pytest.importorskip(library)
    if library == "polars":
        columns = dict(zip([*NAMES, "class"], [*INPUTS.T, TARGETS], strict=True))
        module.DataFrame(columns).write_parquet(tmp_path / "rows.parquet")
    for found in everywhere(world_size, train_both, library, str(tmp_path)):
        assert [name for name, is_same in found.items() if not is_same] == []
        assert len(found) >= 8


def frame(**more: Any) -> Any:
    return importlib.import_module("pandas").DataFrame({"area": INPUTS[:, 0], **more})


def trainer_of() -> Any:
    model = nn.Linear(2, CLASSES)
    return cx.DistributedTrainer(model, "cross_entropy", adam(model))


def refusals() -> list[str]:
    """Returns what wrong tables are refused with, on this rank."""
    words = frame(city=["Oslo"] * 23)
    good = frame(age=INPUTS[:, 1])
    y = good["area"].astype(int).abs() % 2
    trainer = trainer_of()
    calls: list[Callable[[], Any]] = [
        lambda: trainer.fit(words, y),
        lambda: trainer.fit(good, y, validation_data=(words, y)),
        lambda: trainer.evaluate({"x": words}, y),
        lambda: trainer.predict(words),
        lambda: trainer.fit(good, y.sample(frac=1.0, random_state=0)),
        lambda: trainer.fit(good, words["city"]),
        lambda: trainer.fit(good, y.where(y.index > 1).astype("Int64")),
        lambda: trainer.fit(good, y.to_frame()),
        lambda: trainer.train_on_batch(words, y),
    ]
    return [ending(call) for call in calls]


def test_wrong_tables_are_refused_in_every_call_on_every_rank_alike():
    first, second = run_world(2, refusals)
    for words, message, other in zip(
        (
            "ConfigError: X is a table with column 'city' (text); it must hold numbers or booleans. Encode text",
            "ConfigError: validation data: X is a table with column 'city' (text)",
            "ConfigError: X['x'] is a table with column 'city' (text)",
            "ConfigError: X is a table with column 'city' (text)",
            "ConfigError: X and y have different indexes: ",
            "ConfigError: y is a column of text; it must hold numbers or booleans. Number the classes, as in numpy.un",
            "ConfigError: CrossEntropyLoss wants class indices of an integer dtype, and y has dtype float64, with NaN "
            "in 2 samples (first in sample 0): drop such samples, or give them a class of their own, as in y.fillna(",
            "ConfigError: CrossEntropyLoss wants one class number per sample, and y has shape (n, 1): give "
            "numpy.asarray(y).reshape(-1), or the column of a table, as in df['class'].",
            "ConfigError: X is a table with column 'city' (text)",
        ),
        first,
        second,
        strict=True,
    ):
        assert message.startswith(words), message
        assert other.startswith(words), other


def warnings_of_missing() -> list[str]:
    ages = importlib.import_module("pandas").Series([1, None] * 11 + [1], dtype="Int64")
    with warning_texts() as caught:
        y = TARGETS % CLASSES
        trainer_of().fit(frame(age=ages), y, epochs=1, verbose=False, on_nonfinite="skip")
        model = WithCodes()
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        numbers = frame(rooms=1, age=ages, floor=2.0)
        trainer.fit({"numbers": numbers, "city": y}, y, epochs=1, verbose=False, on_nonfinite="skip")
    return [each for each in caught if "holds nan" in each]


@pytest.mark.parametrize("world_size", [1, 2])
def test_missing_values_are_warned_of_with_the_names_of_their_columns(world_size):
    first, *others = everywhere(world_size, warnings_of_missing)
    assert len(first) == 2
    assert first[0].startswith("sample 1 of X holds nan, the first of 11 such samples (column 'age'). on_nonfinite")
    assert first[1].startswith("sample 1 of X['numbers'] holds nan, the first of 11 such samples (column 'age').")
    assert others == [[]] * (world_size - 1)


def test_a_table_validates_a_model_without_y():
    with one_process():
        model = make_model(outputs=1)
        table = frame(**dict(zip(NAMES[1:], INPUTS[:, 1:].T, strict=True)))
        trainer = cx.DistributedTrainer(OwnLoss(model), None, adam(model))
        history = trainer.fit(table, validation_data=table, **FIT)
        assert len(history.val_losses) == 2


class OwnLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(input).square().mean()}


@pytest.mark.nightly
def test_a_query_validates_a_model_without_y():
    polars: Any = pytest.importorskip("polars")
    with one_process():
        model = make_model(outputs=1)
        table = polars.LazyFrame(dict(zip(NAMES, INPUTS.T, strict=True)))
        trainer = cx.DistributedTrainer(OwnLoss(model), None, adam(model))
        assert len(trainer.fit(table, validation_data=table, **FIT).val_losses) == 2


@pytest.mark.nightly
def test_a_dataset_of_hugging_face_without_a_format_is_asked_for_one_in_one_line(monkeypatch):
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar, also a disabled one, leaves a thread
    rows = datasets.Dataset.from_dict({"input": INPUTS.tolist(), "labels": TARGETS.tolist()})
    with one_process():
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        for data in (rows, torch.utils.data.DataLoader(rows, batch_size=6, shuffle=True)):
            message = refusal(trainer.fit, data, **{**FIT, "effective_batch_size": None})
            assert message.startswith(
                "X is a datasets.Dataset without a format: its column 'input' gives a list, not a tensor, for each "
                'sample. Give X.with_format("torch").'
            )
            assert len(message) < 200
        history = trainer.fit(rows.with_format("torch"), **FIT)
        assert history.train_losses[-1] < history.train_losses[0]


COLUMNS = "must have the columns that the model was trained with, in their order, because it gets them by place: "


def refuse_other_columns() -> list[str]:
    """Returns the refusals of tables with other columns than those of training, on this rank."""
    rows = frame(rooms=INPUTS[:, 1])
    trainer = trainer_of()
    swapped = rows[["rooms", "area"]]
    trainer.fit(rows, TARGETS, **FIT)
    trainer.predict(INPUTS[:, :2])  # an array has no names
    return [
        refusal(trainer.predict, swapped),
        refusal(trainer.evaluate, rows.rename(columns={"area": "size"}), TARGETS),
        refusal(trainer.fit, rows, TARGETS, validation_data=(swapped, TARGETS), **FIT),
        refusal(trainer.fit, swapped, TARGETS, **FIT),
        refusal(trainer.train_on_batch, swapped, TARGETS),
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_columns_in_another_order_than_in_training_are_refused(world_size):
    pytest.importorskip("pandas")
    for order, names, validation, *trained in everywhere(world_size, refuse_other_columns):
        for refused in (order, *trained):
            assert refused.startswith(f"X {COLUMNS}their order differs. Select them")
        assert names.startswith(f"X {COLUMNS}it lacks 'area', and it also has 'size'. Select them")
        assert "validation" in validation
        assert COLUMNS in validation


def refuse_columns_of_a_checkpoint(folder: str) -> list[str]:
    """Returns the refusals of tables with another order than in training, by trainers that have not trained."""
    rows = frame(rooms=INPUTS[:, 1])
    swapped = rows[["rooms", "area"]]
    trainer = trainer_of()
    trainer.fit(rows, TARGETS, **FIT)
    trainer.save_checkpoint(f"{folder}/named.ckpt")
    if cx.is_master():
        unnamed = read_checkpoint(f"{folder}/named.ckpt")
        assert unnamed.others.pop("columns") == {"X": ["area", "rooms"]}
        write_checkpoint(f"{folder}/unnamed.ckpt", unnamed)
        cx.save_weights(trainer.model, f"{folder}/weights.safetensors")
    cx.barrier()
    loaded = trainer_of()
    loaded.load_checkpoint(f"{folder}/named.ckpt")
    loaded.evaluate(rows, TARGETS)
    found = [refusal(loaded.evaluate, swapped, TARGETS), refusal(loaded.predict, swapped)]
    for name in ("named", "unnamed"):
        resumed = trainer_of()
        if name == "named":
            found.append(refusal(resumed.fit, swapped, TARGETS, resume=f"{folder}/named.ckpt", **FIT))
            resumed.predict(swapped)  # the refused fit has trained nothing
        resumed.fit(rows, TARGETS, resume=f"{folder}/{name}.ckpt", **FIT)
        found.append(refusal(resumed.predict, swapped))
    loaded.load_checkpoint(f"{folder}/unnamed.ckpt")
    loaded.predict(swapped)
    weights = trainer_of()
    cx.load_weights(weights.model, f"{folder}/weights.safetensors")
    weights.predict(swapped)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_keeps_the_names_of_the_columns(world_size, tmp_path):
    pytest.importorskip("pandas")
    for found in everywhere(world_size, refuse_columns_of_a_checkpoint, str(tmp_path)):
        assert len(found) == 5
        assert all(f"X {COLUMNS}their order differs. Select them" in each for each in found)
        assert found[2].startswith(f"fit cannot resume from {tmp_path}/named.ckpt: X must have the columns")


def resume_from_an_array(folder: str) -> list[str]:
    """Returns a refusal after a fit of a table has resumed from a fit of its array, and the other way round."""
    rows = frame(rooms=INPUTS[:, 1]).set_axis([2020, 2021], axis=1)
    found = []
    for number, (first, second) in enumerate([(rows, rows.to_numpy()), (rows.to_numpy(), rows)]):
        trainer_of().fit(first, TARGETS, checkpoint_dir=f"{folder}/{number}", checkpoint_every_n_epochs=1, **FIT)
        resumed = trainer_of()
        resumed.fit(second, TARGETS, checkpoint_dir=f"{folder}/{number}", resume="auto", **{**FIT, "epochs": 3})
        found.append(refusal(resumed.predict, rows[[2021, 2020]]))
    return found


def test_a_fit_that_resumes_knows_the_names_of_either_table(tmp_path):
    pytest.importorskip("pandas")
    with one_process():
        assert all(f"X {COLUMNS}their order differs." in each for each in resume_from_an_array(str(tmp_path)))


def refuse_columns_of_one_rank() -> str:
    rows = frame(rooms=INPUTS[:, 1])
    if cx.get_rank() == 1:
        rows = rows.rename(columns={"area": "size"})
    return refusal(trainer_of().fit, rows, TARGETS, **FIT)


def test_ranks_with_other_columns_are_refused():
    pytest.importorskip("pandas")
    for message in run_world(2, refuse_columns_of_one_rank):
        assert "rank 1 differs from rank 0 in the columns of X of the training data: ['size', 'rooms'] on" in message


def test_a_batch_names_the_columns_for_predictions():
    pytest.importorskip("pandas")
    with one_process():
        rows = frame(rooms=INPUTS[:, 1])
        trainer = trainer_of()
        trainer.train_on_batch(rows, TARGETS)
        assert COLUMNS in refusal(trainer.predict, rows[["rooms", "area"]])


class FromColumns(nn.Module):
    """Looks columns of one table up, as they are or changed."""

    def __init__(self, change: Callable[[Tensor], Tensor] = torch.as_tensor, make: Any = nn.Embedding) -> None:
        super().__init__()
        self.change = change
        self.street = make(5, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.street(self.change(rows)[:, 1])


class Shifted(nn.Embedding):
    """Has a place for missing values."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


def shifted(*size: int) -> Any:
    made: Any = nn.Embedding(*size)
    look_up = made.forward
    made.forward = lambda codes: look_up(codes + 1)
    return made


def refuse_codes() -> list[str]:
    """Returns the refusals of codes that no class and no row of an embedding has; only late samples have them."""
    codes = pandas.Series(TARGETS).astype("category").cat.codes
    missing = codes.where(codes.index < 20, -1)
    numbers = frame(rooms=1.0, age=2.0, floor=3.0)
    nullable = missing.astype("Int64").where(missing.index < 20)
    streets = pandas.DataFrame({"city": TARGETS, "street": codes.where(codes.index != 21, 7).astype("int64")})
    trainer, columns, classes = (
        cx.DistributedTrainer(model, "cross_entropy", adam(model))
        for model in (WithCodes(), FromColumns(), make_model())
    )
    trainer.fit({"numbers": numbers, "city": codes}, TARGETS, **FIT)
    return [
        refusal(trainer.fit, {"numbers": numbers, "city": missing}, TARGETS, **FIT),
        refusal(trainer.evaluate, {"numbers": numbers, "city": missing}, TARGETS),
        refusal(trainer.predict, {"numbers": numbers, "city": nullable}),
        refusal(columns.fit, streets, TARGETS, **FIT),
        refusal(classes.fit, INPUTS, missing, **FIT),
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_codes_that_an_embedding_or_the_classes_lack_are_refused_with_column_and_sample(world_size):
    pytest.importorskip("pandas")
    for found in everywhere(world_size, refuse_codes):
        looked_up = "and the embedding 'words' looks up 0 to 4. Number categories from 0, and make the embedding as"
        assert found[0].startswith(f"X['city'] holds -1 (sample 20, the first of 3), {looked_up}")
        assert found[1] == found[0]
        assert found[0].endswith(
            "(NaN, or -1 in pandas' .cat.codes) need a number of their own, as in codes + 1; or drop such samples."
        )
        assert found[2].startswith(f"X['city'] holds nan (sample 20, the first of 3), {looked_up}")
        assert found[3].startswith(
            "column 'street' of X holds 7 (sample 21, the first of 1), and the embedding 'street'"
        )
        assert found[4].startswith("y holds class -1 (sample 20), and the model has outputs for classes 0 to 2. Number")
        assert "or ignore them with nn.CrossEntropyLoss(ignore_index=-1)." in found[4]


def test_codes_that_the_model_changes_before_it_looks_them_up_are_its_own_matter():
    codes = torch.from_numpy(np.column_stack([TARGETS, np.where(np.arange(23) == 20, -1, TARGETS)]))
    in_place = FromColumns(lambda rows: rows.clamp_(min=0))
    for model in (in_place, FromColumns(lambda rows: rows + 1), FromColumns(make=Shifted), FromColumns(make=shifted)):
        with one_process():
            trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
            trainer.fit(codes, TARGETS, **FIT)
            assert trainer.predict(codes).shape == (23, CLASSES)
            assert not model.street._forward_pre_hooks
    copying = FromColumns(lambda rows: rows - 9)
    with one_process():
        message = refusal(cx.DistributedTrainer(copying, "cross_entropy", "adam").fit, codes, TARGETS, **FIT)
    assert "IndexError: index out of range in self. An embedding looks up numbers from 0 to num_embeddings" in message


class FromKindsAndWords(nn.Module):
    """Looks two rows of codes per sample up, in embeddings of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(2, CLASSES)
        self.words = nn.Embedding(9, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return (self.kinds(rows[:, 0]) + self.words(rows[:, 1])).mean(1)


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    length = max(sample.shape[1] for sample in samples)
    rows = [nn.functional.pad(sample, (0, length - sample.shape[1])) for sample in samples]
    return torch.stack(rows), torch.zeros(len(rows), dtype=torch.int64)


def test_codes_are_not_mistaken_for_others_where_batches_are_padded_to_other_lengths():
    samples: Any = [torch.tensor([[1] * length, [8] * length]) for length in (1, 1, 5, 5)]
    model = FromKindsAndWords()
    with one_process():
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        trainer.fit(DataLoader(samples, 4, collate_fn=padded), epochs=1, verbose=False)
        assert trainer.history.train_losses


def test_an_embedding_that_gets_no_tensor_fails_with_the_words_of_pytorch():
    model = FromColumns(lambda rows: rows.cpu().numpy())
    with one_process():
        message = ending(cx.DistributedTrainer(model, "cross_entropy", "adam").fit, INPUTS, TARGETS, **FIT)
    assert "must be Tensor, not numpy.ndarray" in message


def test_codes_of_categories_go_into_an_embedding():
    pandas: Any = pytest.importorskip("pandas")
    codes = pandas.Series(TARGETS).astype("category").cat.codes
    assert codes.dtype == np.int8
    with one_process():
        model = nn.Sequential(nn.Embedding(CLASSES, CLASSES))
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        trainer.fit(codes, TARGETS, **FIT)
        assert trainer.predict(codes).shape == (23, CLASSES)
