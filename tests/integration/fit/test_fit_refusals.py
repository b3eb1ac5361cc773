"""Claims about what `fit` refuses: before training starts, in words, on every rank alike, and nothing has changed."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, adam, everywhere, fingerprint, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import ending, refuses, warning_texts
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.data.sources.arrays import ArraySource

pytestmark = pytest.mark.usefixtures("rank_server")

INPUTS, TARGETS = make_rows(12)
NUMBERS = INPUTS[:, :1]
ONE_EPOCH = cx.DistributedTrainingConfig(epochs=1)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, TARGETS), batch_size=4)
TABLE = "the loss would compare every sample with every other"


def trainer_of(model: nn.Module | None = None, loss_fn: Any = "cross_entropy", make: Any = adam, **more: Any) -> Any:
    model = make_model() if model is None else model
    return cx.DistributedTrainer(model, loss_fn, make(model), **more)


def regression(outputs: nn.Module | None = None, loss_fn: Any = "mse") -> Any:
    model = make_model(outputs=1)
    return trainer_of(model if outputs is None else nn.Sequential(model, outputs), loss_fn)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.words(tokens))


class Unfinished(cx.callbacks.EarlyStopping):
    def __init__(self) -> None:
        self.mine = 1


class AsKeras(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> Any:
        return self(batch[0])  # type: ignore[operator]


class Numbered(cx.DistributedTrainer):
    def train_step(self, batch: Any, number: int) -> Any:  # type: ignore[override]
        raise AssertionError("nobody calls it")


class NumberedTest(cx.DistributedTrainer):
    def test_step(self, batch: Any, number: int) -> Any:  # type: ignore[override]
        raise AssertionError("nobody calls it")


class LogsAsLightning(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("mine", loss, on_epoch=True)  # type: ignore[call-arg]
        return loss


class AsLightning(cx.callbacks.Callback):
    def on_epoch_end(self, trainer: Any, pl_module: Any, number: int) -> None:  # type: ignore[override]
        raise AssertionError("nobody calls it")


class WithoutArguments(cx.callbacks.Callback):
    def on_epoch_end(self) -> None:  # type: ignore[override]
        raise AssertionError("nobody calls it")


class ByKeyword(cx.callbacks.Callback):
    def on_train_batch_end(self, batch: int, *, logs: Any) -> None:  # type: ignore[override]
        raise AssertionError("nobody calls it")


class SavesAsLightning(cx.callbacks.Callback):
    def state_dict(self, trainer: Any) -> Any:  # type: ignore[override]
        raise AssertionError("nobody calls it")


def calling(callback: Any) -> Callable[[], Any]:
    return lambda: trainer_of().fit(INPUTS, TARGETS, callbacks=callback)


def setting(name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(trainer_of(), name, value)


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.factor = nn.Linear(FEATURES, CLASSES), torch.ones(CLASSES, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.factor


def measured(metric: Any) -> Any:
    return trainer_of(metrics={"mine": metric}).fit(INPUTS, TARGETS)


def fit_rows(*more: Any, **settings: Any) -> Any:
    return trainer_of().fit(INPUTS, TARGETS, *more, **settings)


NOT_CALLED = r", and fit does not call it: make it train_step\(self, batch\) of a subclass"
# What a rank is given -> what the error says. Each trainer is new; the rows are right where nothing else is given.
Way = Callable[[], Any]
WRONG: list[tuple[Way, str]] = [
    (lambda: trainer_of().fit(INPUTS, TARGETS[:5]), "12 and 5 samples"),
    (lambda: trainer_of().fit(INPUTS[:0], TARGETS[:0]), "X has no samples"),
    (lambda: trainer_of().fit(INPUTS), "y is missing"),
    (lambda: trainer_of().fit(), "it got 0 arrays"),
    (lambda: fit_rows(INPUTS), "it got 3 arrays"),
    (
        lambda: trainer_of().fit(
            INPUTS, TARGETS, cx.DistributedTrainingConfig(), config=cx.DistributedTrainingConfig()
        ),
        "two configs",
    ),
    (lambda: fit_rows(resume=3), "the path of a checkpoint or None"),
    (
        lambda: trainer_of().fit(lambda: iter([{"image": INPUTS}])),
        "the batches have image, and y must be called one of labels",
    ),
    (lambda: fit_rows(x=INPUTS), "X twice"),
    (lambda: trainer_of().fit(3.0, TARGETS), "X is a single number"),
    (lambda: fit_rows(batch_size=0), "batch_size"),
    (lambda: fit_rows(batch_size=2.5), "batch_size"),
    (lambda: fit_rows(epochs=0), "epochs"),
    (lambda: fit_rows(effective_batch_size=0), "effective"),
    (lambda: fit_rows(seed=-1), "seed"),
    (lambda: fit_rows({"epochs": 3}), "settings go by name"),
    (lambda: fit_rows(lr=0.1), "The optimizer has it"),
    (lambda: fit_rows(resume="Auto"), 'did you mean "auto"'),
    (
        lambda: fit_rows(compression="fp16"),
        r"no argument 'compression': it belongs to DistributedTrainer\(ddp_config=cx\.DDPConfig\(compression=\.\.\.",
    ),
    (
        lambda: fit_rows(growth_factor=4.0),
        r"no argument 'growth_factor': it belongs to fit\(amp=cx\.AMPConfig\(growth_factor=\.\.\.",
    ),
    (
        lambda: fit_rows(scheduler="cosine"),
        r"no argument 'scheduler': it belongs to DistributedTrainer\(scheduler=\.\.\.",
    ),
    (lambda: fit_rows(learning_rate=0.1), r"'learning_rate'\. The optimizer has it"),
    (lambda: fit_rows(cx.DDPConfig()), "fit got a DDPConfig"),
    (lambda: fit_rows(cx.DistributedTrainingConfig), "fit got the class DistributedTrainingConfig"),
    (lambda: fit_rows(max_grad_norm=1.0), "Did you mean 'clip_norm'"),
    (lambda: fit_rows(epoch=3), "Did you mean 'epochs'"),
    (lambda: fit_rows(config={}), "DistributedTrainingConfig"),
    (lambda: fit_rows(callbacks=[print]), "callbacks must be instances of"),
    (calling([cx.callbacks.EarlyStopping]), r"the class EarlyStopping: pass an object, callbacks=\["),
    (calling(cx.callbacks.EarlyStopping), "the class EarlyStopping: pass an object"),
    (calling("early_stopping"), r"got early_stopping \(a str\)"),
    (calling(3), r"got 3 \(a int\)"),
    (calling({"stop": cx.callbacks.EarlyStopping("loss")}), r"\(a dict\)"),
    (
        calling(AsLightning()),
        r"takes \(self, trainer: .*\) .*, and fit passes \(epoch, logs\): define on_epoch_end\(self, epoch, logs\)",
    ),
    (calling(WithoutArguments()), r"WithoutArguments\.on_epoch_end takes \(self\)"),
    (calling(ByKeyword()), r"define on_train_batch_end\(self, batch, logs\)"),
    (calling(SavesAsLightning()), r"fit passes \(\): define state_dict\(self\)"),
    (
        calling(cx.callbacks.LambdaCallback(on_epoch_end=lambda logs: None)),
        r"LambdaCallback\.on_epoch_end takes \(logs\), and fit passes \(epoch, logs\): define on_epoch_end\(epoch, ",
    ),
    (
        lambda: (trainer := trainer_of()).callbacks.append(cx.callbacks.Timer) or trainer.fit(INPUTS, TARGETS),
        "the class Timer: pass an object",
    ),
    (
        lambda: fit_rows((INPUTS, TARGETS)),
        r"it got 3 arrays\. Name the rest: validation_data=\(X_val, y_val\) or a DataLoader",
    ),
    (lambda: fit_rows(32, 10), r"fit got 32 by position\. Name the rest"),
    (lambda: trainer_of().fit([LOADER, LOADER]), "X is a list of DataLoaders, .*ConcatDataset"),
    (lambda: trainer_of().fit({"train": LOADER, "val": LOADER}), "X is a dict of DataLoaders"),
    (
        lambda: trainer_of().fit(LOADER, (INPUTS, TARGETS)),
        r"X is a DataLoader, which gives y itself, .* To validate, give validation_data=\(X_val, y_val\)",
    ),
    (lambda: trainer_of().fit(once := iter(LOADER), once), "one iterator to train on and to validate"),
    (lambda: trainer_of().fit(once := iter(LOADER), validation_data=once), "one iterator to train on and to validate"),
    (
        lambda: trainer_of(make=lambda model: torch.optim.SGD(model.parameters(), float("nan"))).fit(INPUTS, TARGETS),
        r"SGD has the learning rates \[nan\]: give finite numbers",
    ),
    (
        lambda: fit_rows(class_weight={"0": 1.0, "1": 1.0, "2": 1.0}),
        "it has one for class '0', '1', '2': give one for each class, by its number",
    ),
    (lambda: trainer_of().fit((INPUTS, NUMBERS)), r"X and y are two arguments: fit\(X, y\)"),
    (lambda: fit_rows(resume=True), 'Did you mean "auto", the newest'),
    (
        lambda: trainer_of().fit(INPUTS, nn.functional.one_hot(TARGETS)),
        r"one-hot rows of whole numbers: give class numbers, y\.argmax\(1\)",
    ),
    (
        lambda: trainer_of(make_model(outputs=1)).fit(INPUTS, TARGETS),
        "For two classes, one output takes loss_fn='bce_with_logits'",
    ),
    (
        lambda: regression(loss_fn="bce").fit(INPUTS, (NUMBERS > 0).float()),
        r"output is from -.*, and BCELoss takes probabilities: end the model with Sigmoid\(\), or take loss_fn='bce",
    ),
    (lambda: fit_rows(class_weight="balanced"), r"a dictionary, as dict\(enumerate\(weights\)\), got balanced"),
    (lambda: trainer_of().fit(np.array([[None]] * 12), TARGETS), "X holds object values"),
    (lambda: trainer_of().fit(INPUTS, np.array(["a"] * 12)), "y holds <U1 values"),
    (lambda: trainer_of().fit([[1.0], [1.0, 2.0]], TARGETS[:2]), "X cannot be converted to an array"),
    (lambda: trainer_of().fit(np.ma.array(INPUTS.numpy()), TARGETS), "the mask would be lost"),
    (lambda: trainer_of().fit(INPUTS.to_sparse(), TARGETS), "to_dense"),
    (lambda: trainer_of().fit(INPUTS[:, :3], TARGETS), "the model cannot take X"),
    (
        lambda: trainer_of().fit(INPUTS, TARGETS.float()),
        r"dtype float32: give y\.long\(\), or numpy\.asarray\(y\)\.astype\('int64'\)",
    ),
    (lambda: trainer_of().fit({"img": INPUTS}, TARGETS), r"\(forward takes input, and X has img, so X is passed whole"),
    (
        lambda: cx.DistributedTrainer(make_model(), {"a": "mse", "b": "mse"}).fit(INPUTS, {"a": NUMBERS, "B": NUMBERS}),
        r"has a loss for \['b'\], and y has the parts \['a', 'B'\]",
    ),
    (lambda: trainer_of().fit(INPUTS, TARGETS[:, None]), r"numpy\.asarray\(y\)\.reshape\(-1\)"),
    (lambda: trainer_of().fit(INPUTS, torch.where(torch.arange(12) == 9, 7, TARGETS)), r"y holds class 7 \(sample 9\)"),
    (lambda: regression(nn.Flatten(0)).fit(INPUTS, NUMBERS), TABLE),
    (lambda: regression().fit(INPUTS, NUMBERS[:, 0]), TABLE),
    (lambda: regression(loss_fn=own_loss).fit(INPUTS, NUMBERS[:, 0]), TABLE),
    (lambda: regression().fit(INPUTS, INPUTS), "this loss needs one shape"),
    (lambda: regression(loss_fn=lambda *_: [1]).fit(INPUTS, NUMBERS), r"returned list"),
    (lambda: regression(loss_fn=lambda *_: (1, 2, 3)).fit(INPUTS, NUMBERS), r"returned tuple"),
    (
        lambda: trainer_of(Sparse()).fit(TARGETS[:, None], TARGETS),
        r"words\.weight makes sparse gradients, which PyTorch's Adam does not take: use SGD or Adagrad",
    ),
    (
        lambda: trainer_of(Sparse(), make=lambda m: torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.1)).fit(
            TARGETS[:, None], TARGETS
        ),
        r"words\.weight makes sparse gradients, which PyTorch's weight_decay does not take: use no weight_decay",
    ),
    (lambda: trainer_of(nn.LazyLinear(3)).fit(INPUTS, TARGETS), "lazy module"),
    (lambda: trainer_of(make_model().requires_grad_(False)).fit(INPUTS, TARGETS), "no parameters"),
    (lambda: cx.DistributedTrainer(nn.ReLU(), "mse").fit(INPUTS, INPUTS), "no parameters to train"),
    (lambda: trainer_of(make=lambda _: adam(make_model())).fit(INPUTS, TARGETS), "not the model's"),
    (lambda: fit_rows(INPUTS[:, 1:], TARGETS), "validation data: the model cannot take X"),
    (lambda: fit_rows(validation_data=(INPUTS, TARGETS[1:])), "validation data: X and y have different lengths"),
    (lambda: fit_rows(validation_data=INPUTS), r"\(X_val, y_val\)"),
    (lambda: fit_rows(INPUTS, TARGETS, validation_data=(INPUTS, TARGETS)), "twice"),
    (lambda: fit_rows(validation_data=(INPUTS, TARGETS), validation_split=0.5), "give one of them"),
    (lambda: trainer_of().fit((INPUTS > 0).long(), TARGETS), r"X holds whole numbers: convert it with \.float\(\)"),
    (
        lambda: trainer_of(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(16, 3))).fit(INPUTS, TARGETS),
        r"An embedding takes whole numbers: convert them with \.long\(\)",
    ),
    (
        lambda: trainer_of().fit(INPUTS[:, None].repeat(1, 5, 1), TARGETS[:, None].repeat(1, 5)),
        r"shape \(n, 5, 3\) and y has \(n, 5\).* let the model return output\.transpose\(1, 2\)",
    ),
    (
        lambda: trainer_of().fit([*zip(INPUTS, TARGETS, strict=True)]),
        r"X is a list of \(x, y\) pairs, one per sample: give DataLoader\(pairs",
    ),
    (
        lambda: fit_rows(callbacks=Unfinished()),
        r"Unfinished has an __init__ that does not call EarlyStopping's, .*: call super\(\)\.__init__\(\.\.\.\) first",
    ),
    (
        lambda: AsKeras(make_model()).fit(INPUTS, TARGETS),
        r"the trainer is not the model: call self\.model\(x\), without training=",
    ),
    (
        lambda: Numbered(make_model()).fit(INPUTS, TARGETS),
        r"Numbered\.train_step takes \(self, batch, number\), .*: make it train_step\(self, batch\)",
    ),
    (
        lambda: LogsAsLightning(make_model()).fit(INPUTS, TARGETS),
        "log has no argument 'on_epoch'. The history has one number per epoch",
    ),
    (lambda: measured(lambda *_: "good"), r"mine must return .*; for 12 samples it returned str good"),
    (lambda: measured(lambda *_: None), "for 12 samples it returned NoneType None"),
    (lambda: measured(lambda *_: {"a": 1}), "for 12 samples it returned dict {'a': 1}"),
    (lambda: measured(lambda *_: (1, 2, 3)), r"for 12 samples it returned tuple \(1, 2, 3\)"),
    (lambda: measured(lambda *_: ("a", 2)), r"it returned tuple \('a', 2\)"),
    (
        lambda: measured(lambda target, output: output.argmax(1) == target),
        r"cannot take .*\. It takes them in the other order: a metric is a function of \(output, target\)",
    ),
    (
        lambda: trainer_of(make_model().to("meta")).fit(INPUTS, TARGETS),
        r"0\.weight, 0\.bias.* are on the meta device, which keeps no values: make the model without it",
    ),
    (
        lambda: trainer_of(Elsewhere()).fit(INPUTS, TARGETS),
        "A tensor was left on the device where it was created: register",
    ),
    (lambda: fit_rows(validation_split=1.0), "validation_split"),
    (lambda: trainer_of().fit(INPUTS[:1], TARGETS[:1], validation_split=0.5), "at least one"),
    *(
        (lambda trainer=trainer: trainer().fit(INPUTS, TARGETS), words)
        for trainer, words in (
            (lambda: trainer_of(Lightning(make_model())), f"^Lightning has a training_step{NOT_CALLED}"),
            (lambda: trainer_of(KerasModel(make_model())), f"^KerasModel has a train_step{NOT_CALLED}"),
            (lambda: Stepping(make_model(), "cross_entropy"), r"Stepping has a training_step, .* train_step\(self, ba"),
            (
                lambda: Validating(make_model(), "cross_entropy"),
                r"Validating has a validation_step, .* test_step\(self",
            ),
        )
    ),
]
test_one_process_refuses_to_fit = refuses(*WRONG)
# Other ranks hear nothing of what another call than fit refuses.
test_other_calls_are_refused = refuses(
    (setting("optimizer", "sgd"), r"trainer\.optimizer cannot be replaced: make a new Dist"),
    (setting("model", make_model()), r"trainer\.model cannot be replaced"),
    (setting("scheduler", "cosine"), r"trainer\.scheduler cannot be replaced"),
    (setting("lr", 0.1), r"no attribute 'lr'\. Call trainer\.set_learning_rates"),
    (setting("epochs", 3), r"no attribute 'epochs': it belongs to fit\(epochs=\.\.\.\)"),
    (setting("should_stop", True), "Did you mean 'stop_training'"),
    (setting("callbacks", [cx.callbacks.EarlyStopping]), "the class EarlyStopping: pass an object"),
    (
        lambda: NumberedTest(make_model(), "cross_entropy").evaluate(INPUTS, TARGETS),
        r"NumberedTest\.test_step takes \(self, batch, number\), .*: make it test_step\(self, batch\)",
    ),
    (lambda: trainer_of().evaluate(INPUTS, TARGETS, batchsize=3), "evaluate has .*'batchsize'. Did you mean 'batch_si"),
    (lambda: trainer_of().predict(x=INPUTS), "predict has no argument 'x'. Did you mean 'X'"),
)


def test_evaluate_and_predict_take_kerass_verbose(capsys):
    trainer = trainer_of()
    with one_process():
        assert trainer.evaluate(INPUTS, TARGETS, verbose=0) == trainer.evaluate(INPUTS, TARGETS)
        assert len(trainer.predict(INPUTS, verbose=0)) == len(INPUTS)
    assert capsys.readouterr().out == ""


def right_fit() -> str:
    trainer = trainer_of()
    trainer.fit(INPUTS, TARGETS, epochs=1, batch_size=2, verbose=False)
    return fingerprint(trainer.model)


def refuse_all(one_rank: bool, every: int) -> tuple[list[str], str]:
    """Gives every n-th wrong thing to all ranks, or to rank 1 only; returns the errors, and the bits of a right fit."""
    is_right = one_rank and cx.get_rank() == 0
    return [ending(right_fit if is_right else way) for way, _ in WRONG[::every]], right_fit()


@pytest.mark.parametrize(("one_rank", "every"), [(False, 6), by_night(False, 1), (True, 6), by_night(True, 1)])
def test_every_rank_refuses_also_what_only_one_of_them_was_given(one_rank, every):
    (first, bits), (second, other_bits) = run_world(2, refuse_all, one_rank, every)
    assert bits == other_bits
    assert [text for text in (*first, *second) if not text.startswith("ConfigError: ")] == []
    for text, own in zip(first, second, strict=True):
        # What differs in kind is seen before anybody looks at the rest.
        if one_rank and not own.startswith("ConfigError: rank 1 differs"):
            assert text == own.replace("ConfigError: ", "ConfigError: rank 1 refuses to start: ", 1)
        else:
            assert text == own


def fit_of_rank(name: str) -> None:
    """Is right on each rank by itself; what `name` says is different on rank 1."""
    rank = cx.get_rank()

    def differs(what: str) -> int:
        return rank if name == what else 0

    model = make_model(outputs=3 + differs("the model's shapes"))
    model[0].requires_grad_(not differs("what is trained"))
    kind = torch.optim.AdamW if differs("the optimizer") else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.001 * (1 + differs("the learning rate")))
    loss_fn = nn.CrossEntropyLoss(reduction="sum" if differs("the loss") else "mean")
    ddp_config = cx.DDPConfig(find_unused_parameters=True, bucket_size_mb=25 - differs("the buckets"))
    trainer = cx.DistributedTrainer(model, loss_fn, optimizer, ddp_config=ddp_config)
    trainer._state.position.epoch = differs("the epochs before")
    if name == "the optimizer's state":
        model(INPUTS).sum().backward()
        optimizer.step()
        optimizer.state[model[0].weight]["exp_avg"] += rank
    inputs = INPUTS + differs("X")
    trainer.fit(
        inputs.double() if differs("the type of X") else inputs,
        (TARGETS + differs("y")) % 3,
        epochs=1 + differs("epochs"),
        batch_size=2 + differs("batch_size"),
        seed=differs("seed"),
        shuffle=not differs("shuffle"),
        validation_split=0.25 * differs("validation"),
        verbose=not rank and name == "no difference",
        checkpoint_dir=f"folder{rank}",
    )


# What differs -> the name of the fact in the error.
DIFFERENT = {
    "X": "training X: hash of its values",
    "y": "training y: hash of its values",
    "the type of X": "training X: dtype",
    "epochs": "the setting epochs: 2 on rank 1, 1 on rank 0",
    "batch_size": "the setting batch_size: 3 on rank 1, 2 on rank 0",
    "seed": "the setting seed: 1 on rank 1, 0 on rank 0",
    "shuffle": "the setting shuffle",
    "validation": "the setting validation_split",
    "the loss": "the loss: CrossEntropyLoss, sum on rank 1, CrossEntropyLoss, mean over samples on rank 0",
    "the model's shapes": "the parameter 2.weight: float32 [4, 8] on rank 1, float32 [3, 8] on rank 0",
    "what is trained": "the parameter 0.weight: float32 [8, 4], frozen on rank 1",
    "the optimizer": "the optimizer: AdamW on rank 1, Adam on rank 0",
    "the learning rate": "the optimizer's lr (group 0): 0.002 on rank 1, 0.001 on rank 0",
    "the optimizer's state": "the optimizer's state of 0.weight: hash of its values",
    "the buckets": "ddp_config.bucket_size_mb: 24 on rank 1, 25 on rank 0",
    "the epochs before": "the number of epochs trained before: 1 on rank 1, 0 on rank 0",
}


def refuse_differences() -> dict[str, str]:
    return {name: ending(fit_of_rank, name) for name in [*DIFFERENT, "no difference"]}


def test_ranks_that_differ_in_data_settings_model_or_optimizer_are_refused_on_every_rank():
    for found in run_world(2, refuse_differences):
        assert found.pop("no difference") == "returned None"  # what a rank shows, and where it writes, is its own
        for name, words in DIFFERENT.items():
            assert found[name].startswith(f"ConfigError: rank 1 differs from rank 0 in {words}"), found[name]
        assert "torch.manual_seed(0) before torch.randn" in found["X"]


class Busy(nn.Module):
    """Draws random numbers and changes its buffers whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(make_model(), nn.BatchNorm1d(3))
        self.register_buffer("runs", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.runs += 1
        self.last = torch.rand(1)
        return self.body(inputs)


def test_a_refusal_changes_nothing_and_a_right_fit_works_afterwards():
    model = Busy()
    model.body[1].eval()
    trainer = trainer_of(model)
    buffers, state = list(model.buffers()), torch.get_rng_state()
    before = fingerprint(model)
    validation = (INPUTS, TARGETS + 7)  # found last, when the model has run twice
    with one_process():
        with pytest.raises(cx.ConfigError, match="validation data: y holds class"):
            trainer.fit(INPUTS, TARGETS, validation_data=validation, epochs=1, verbose=False)
        assert fingerprint(model) == before
        assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert [model.training, model.body[1].training] == [True, False]
        assert (trainer.epoch, trainer.optimizer.state_dict()["state"]) == (0, {})
        assert trainer.fit(INPUTS, TARGETS, epochs=1, batch_size=6, verbose=False).epochs == [1]
    assert model.runs == 2


def warnings_of_fit(row: int) -> list[str]:
    inputs = INPUTS.clone()
    inputs[row, 1] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of().fit(inputs, TARGETS, epochs=1, verbose=False, on_nonfinite="skip")
    return [f"{warning.category.__name__} in {warning.filename}: {warning.message}" for warning in caught]


def test_nan_in_y_is_a_warning_too():
    numbers = NUMBERS.clone()
    numbers[7] = float("nan")
    with one_process(), pytest.warns(UserWarning, match="sample 7 of y holds nan"):
        regression().fit(INPUTS, numbers, epochs=1, verbose=False, on_nonfinite="skip")


@pytest.mark.parametrize("row", [0, by_night(11)])
def test_nan_in_x_is_a_warning_where_the_caller_stands(row):
    first, second = run_world(2, warnings_of_fit, row)  # whichever rank has looked through it
    assert first[0].startswith(f"UserWarning in {__file__}: sample {row} of X holds nan.")
    assert second == []


def fit_where_warnings_are_errors() -> str:
    inputs = INPUTS.clone()
    inputs[3, 1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ending(trainer_of().fit, inputs, TARGETS, epochs=1, verbose=False)


def test_where_a_warning_is_an_error_on_one_rank_the_others_hear_of_it():
    first, second = run_world(2, fit_where_warnings_are_errors)
    assert first.startswith("UserWarning: sample 3 of X holds nan")
    assert second.startswith("DistributedTrainingError: rank 0 has failed: UserWarning: sample 3 of X holds nan")


def test_an_infinity_is_a_warning_and_large_numbers_are_none():
    inputs = torch.full((12, FEATURES), 3e38)
    assert not torch.isfinite(inputs.sum())
    assert ArraySource(inputs, TARGETS).not_finite(0, 1) == ("", 0, [])
    inputs[3, 1], inputs[9] = float("-inf"), float("nan")
    source = ArraySource(inputs, TARGETS)
    assert [source.not_finite(part, 3) for part in range(3)] == [
        ("sample 3 of X holds -inf", 1, []),
        ("", 0, []),
        ("sample 9 of X holds nan", 1, []),
    ]
    inputs[10, :] = float("nan")
    numbers = NUMBERS.clone()
    numbers[9:] = float("inf")  # two of them in rows that X has spoilt
    assert ArraySource(inputs, numbers).not_finite(0, 1) == ("sample 3 of X holds -inf", 4, [])
    assert ArraySource(inputs).part(8, 12).not_finite(0, 1) == ("sample 9 of X holds nan", 2, [])
    with one_process(), pytest.warns(UserWarning, match="sample 3 of X holds -inf, the first of 3 such samples."):
        trainer_of().fit(inputs, TARGETS, epochs=1, verbose=False, on_nonfinite="skip")


def test_nan_in_validation_data_is_a_warning_before_anything_starts():
    inputs = INPUTS.clone()
    inputs[4, 1] = float("nan")
    with one_process(), pytest.warns(UserWarning, match="validation data: sample 4 of X holds nan. val_loss may"):
        trainer_of().fit(INPUTS, TARGETS, inputs, TARGETS, epochs=1, verbose=False)


def make(**arguments: Any) -> cx.DistributedTrainer:
    return cx.DistributedTrainer(**{"model": make_model(), **arguments})


def loss_of(model: Any, x: Any, y: Any) -> None:
    raise AssertionError("nobody calls it")


class WithoutSuper(cx.DistributedTrainer):
    def __init__(self, model: nn.Module) -> None:
        self.net = model


SCHEDULE = torch.optim.lr_scheduler.StepLR
test_a_trainer_that_cannot_work_is_not_made = refuses(
    (lambda: make(loss_fn="crossentropy"), "Did you mean 'cross_entropy'"),
    (lambda: make(loss_fn=nn.CrossEntropyLoss), r"CrossEntropyLoss\(\)"),
    (lambda: make(loss_fn=3), "loss_fn must be callable"),
    (lambda: make(optimizer="adamm"), "Did you mean 'adam"),
    (lambda: make(optimizer=3), "optimizer must be"),
    (lambda: make(optimizer=nn.MSELoss()), r"the order is DistributedTrainer\(model, loss_fn, optimizer\)"),
    (lambda: make(optimizer=lambda parameters: 3), "optimizer must be"),
    # What an error shows of an object has names and no address.
    (lambda: make(optimizer=make_model().parameters()), "or a name, got <generator object Module.parameters>"),
    (lambda: make(train_step=loss_of), r"a function of \(trainer, batch\), got loss_of\(model, x, y\)"),
    (lambda: make(model=3), "torch.nn.Module"),
    (lambda: make(model=nn.ReLU(), optimizer="adamm"), "Did you mean 'adam"),
    (lambda: make(model=nn.Linear), r"got <class 'torch.*Linear'> \(a type\)"),
    (lambda: make(scheduler=object()), "scheduler must be one of"),
    (
        lambda: make(scheduler=SCHEDULE),
        r"is the class StepLR, which needs more .* lambda optimizer, total_steps: StepLR\(optimizer",
    ),
    (lambda: make(callbacks=[print]), "callbacks must be instances of .*, got <built-in function print>"),
    (lambda: make(callbacks=["early"]), "callbacks must be instances of .*, got early"),
    (lambda: make(callbacks=[cx.callbacks.EarlyStopping]), "got the class EarlyStopping"),
    (lambda: make(callbacks=False), r"callbacks must be instances of .*, got False"),
    (lambda: make(device="warp"), "device must be"),
    (lambda: make(device="gpu"), "got 'gpu'. Did you mean 'auto'"),
    (lambda: make(device=1.5), "device must be"),
    (lambda: make(ddp_config={"compression": "bf16"}), r"cyxtrain\.DDPConfig"),
    (lambda: make(ddp_config="bf16"), r"cyxtrain\.DDPConfig"),
    (lambda: make(ddp_config=cx.DDPConfig(compression=torch.bfloat16)), "compression must be one of"),
    (lambda: make(ddp_config=cx.DDPConfig(bucket_size_mb=0)), "bucket_size_mb must be"),
    (lambda: make(schedular="cosine"), "DistributedTrainer has .*'schedular'. Did you mean 'scheduler'"),
    (lambda: make(warmup_steps=3), r"'warmup_steps': it belongs to fit\(warmup_steps=\.\.\.\)"),
    (lambda: cx.DistributedTrainingConfig(batchsize=3), r"no field 'batchsize'\. Did you mean 'batch_size'\?"),
    (lambda: setattr(cx.DistributedTrainingConfig(), "epoch", 3), r"no field 'epoch'\. Did you mean 'epochs'\?"),
)
test_a_trainer_whose_constructor_has_not_run_is_refused_wherever_it_is_used_first = refuses(
    *(
        (lambda use=use: use(WithoutSuper(make_model())), r"WithoutSuper has an __init__ .*: call super\(\)\.__init__")
        for use in (
            lambda trainer: trainer.fit(INPUTS, TARGETS),
            lambda trainer: trainer.evaluate(INPUTS, TARGETS),
            lambda trainer: trainer.predict(INPUTS),
            lambda trainer: trainer.train_on_batch(INPUTS, TARGETS),
            lambda trainer: trainer.save_checkpoint("none"),
            lambda trainer: trainer.history,
            lambda trainer: trainer.model,
        )
    )
)


def test_batch_norm_over_ranks_is_refused_on_cpus():
    with_sync = nn.Sequential(nn.Linear(FEATURES, 8), nn.SyncBatchNorm(8), nn.Linear(8, CLASSES))
    with pytest.raises(cx.ConfigError, match=r"the model's 1 is SyncBatchNorm, which PyTorch has on GPUs alone"):
        cx.DistributedTrainer(with_sync, "cross_entropy", "sgd", device="cpu")
    plain = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    with one_process():
        trainer = cx.DistributedTrainer(plain, "cross_entropy", "sgd")
        with pytest.raises(cx.ConfigError, match=r"sync_batchnorm=True, which PyTorch has on GPUs alone"):
            trainer.fit(*make_rows(8), sync_batchnorm=True)
    assert isinstance(plain[1], nn.BatchNorm1d)


class Lightning(nn.Sequential):
    """Has a step that nobody calls."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        raise AssertionError("nobody calls it")


class KerasModel(nn.Sequential):
    def train_step(self, batch: Any) -> torch.Tensor:
        raise AssertionError("nobody calls it")


class Stepping(cx.DistributedTrainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        raise AssertionError("nobody calls it")


class Validating(cx.DistributedTrainer):
    def validation_step(self, batch: Any) -> torch.Tensor:
        raise AssertionError("nobody calls it")


def test_the_amp_trainers_training_step_is_its_own():
    with one_process():
        trainer = cx.DistributedAMPTrainer(Lightning(nn.Linear(FEATURES, CLASSES)), loss_fn="cross_entropy")
        trainer.training_step(make_rows(8))
        assert trainer.step == 1


ITSELF = {
    "cross_entropy": "CrossEntropyLoss applies a softmax",
    "bce_with_logits": "BCEWithLogitsLoss applies a sigmoid",
}
BINARY = (TARGETS > 0).float()[:, None]


def warnings_before_training(model: nn.Module, loss_fn: Any, targets: Any) -> list[str]:
    """Return what `fit` warns of before its first step, which ends it."""
    with one_process(), warning_texts() as caught, contextlib.suppress(InterruptedError):
        trainer_of(model, loss_fn, callbacks=[Interrupting()]).fit(INPUTS, targets, epochs=1, verbose=False)
    return caught


class Interrupting(cx.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        raise InterruptedError


class Ends(nn.Module):
    """Ends with a function."""

    def __init__(self, end: Callable[[Tensor], Any], outputs: int = 1) -> None:
        super().__init__()
        self.net, self.end = make_model(outputs=outputs), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.net(x))


class CompiledFunction(torch.autograd.Function):
    """Hides from the graph what made its output, as a compiled model does."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return scores.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Compiled(nn.Sigmoid):
    def forward(self, input: Tensor) -> Tensor:
        return CompiledFunction.apply(input)  # type: ignore[no-any-return]


SIGMOIDS: dict[str, nn.Module] = {
    "a layer": nn.Sequential(make_model(outputs=1), nn.Sigmoid()),
    "a function": Ends(torch.sigmoid),
    "in another shape": Ends(lambda scores: scores.sigmoid().squeeze(1)[:, None]),
    "clamped": Ends(lambda scores: scores.sigmoid().clamp(1e-6, 1 - 1e-6)),
    "of several heads": Ends(lambda scores: torch.cat([each.sigmoid() for each in scores.split(1, 1)], 1), 2),
    "compiled": Ends(Compiled()),
}


@pytest.mark.parametrize("name", SIGMOIDS)
def test_sigmoid_before_a_loss_that_applies_one_is_warned_of(name):
    targets = BINARY.repeat(1, 2) if "heads" in name else BINARY
    words = (
        f"all 12 samples that were tried are probabilities, and {ITSELF['bce_with_logits']} itself: leave the Sigmoid"
    )
    found = warnings_before_training(SIGMOIDS[name], "bce_with_logits", targets)
    assert [words in each for each in found] == [True]


@pytest.mark.parametrize(
    ("model", "loss_fn", "words"),
    [
        (
            Ends(lambda scores: scores.softmax(1), 3),
            "cross_entropy",
            f"{ITSELF['cross_entropy']} itself: leave the Softmax",
        ),
        (
            Ends(lambda scores: scores.exp() / scores.exp().sum(1, keepdim=True), 3),
            "cross_entropy",
            "leave the Softmax",
        ),
        (Ends(torch.sigmoid, 3), "cross_entropy", f"{ITSELF['cross_entropy']} itself: leave the Sigmoid"),
        (
            Ends(lambda scores: {"a": scores.softmax(1), "b": scores}, 3),
            {"a": "cross_entropy", "b": None},
            "the Softmax",
        ),
        (make_model(), "nll", r"not log-probabilities, which NLLLoss takes: end the model with LogSoftmax\(1\)"),
        (Ends(lambda scores: scores.softmax(1), 3), "nll", "not log-probabilities"),
        (Ends(torch.sigmoid), "bce", ""),
        (make_model(outputs=1), "bce_with_logits", ""),
        (make_model(), "cross_entropy", ""),
        (Ends(lambda scores: scores.log_softmax(1), 3), "nll", ""),
        (Ends(lambda scores: scores.log_softmax(1), 3), "cross_entropy", ""),
        (Ends(lambda scores: scores + scores.sigmoid()), "bce_with_logits", ""),
    ],
)
def test_outputs_of_another_kind_than_the_loss_takes_are_warned_of(model, loss_fn, words):
    targets: Any = {"a": TARGETS} if isinstance(loss_fn, dict) else BINARY if "bce" in loss_fn else TARGETS
    found = warnings_before_training(model, loss_fn, targets)
    assert len(found) == bool(words), found
    assert all(re.search(words, each) for each in found)


def test_labels_of_minus_1_for_a_binary_loss_are_warned_of():
    found = warnings_before_training(make_model(outputs=1), "bce_with_logits", NUMBERS.sign())
    assert len(found) == 1
    assert "y is from -1 to 1, and the loss takes 0 and 1, or probabilities" in found[0]


def fit_diverging(rate: float) -> list[str]:
    model = make_model()
    with warning_texts() as caught:
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), lr=rate))
        trainer.fit(INPUTS, TARGETS, epochs=3, batch_size=2, verbose=False)
    return caught


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_loss_that_leaves_all_bounds_is_warned_of_once(world_size):
    first, *others = everywhere(world_size, fit_diverging, 1e9)
    assert len(first) == 1
    assert re.match(
        r"epoch 1: training diverges: the mean loss is \d\.\d+e\+\d+, and was \d\.\d+ before\. Lower", first[0]
    )
    assert "(1e+09)" in first[0]
    assert others == [[]] * (world_size - 1)
    assert everywhere(world_size, fit_diverging, 0.1) == [[]] * world_size


class Table:
    """What a data frame of pandas or Polars has, as far as `fit` looks."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self._values = [*columns], columns

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array([*zip(*self._values.values(), strict=True)], dtype=dtype or self._dtype())

    def _dtype(self) -> Any:
        kinds = {np.asarray(each).dtype for each in self._values.values()}
        return kinds.pop() if len(kinds) == 1 else object

    def __getitem__(self, name: str) -> Any:
        return Series(name, self._values[name])


class Series:
    def __init__(self, name: str | None, values: list[Any]) -> None:
        self.name, self._values = name, values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = np.asarray(self._values, dtype=dtype)
        return found.astype(object) if found.dtype.kind == "U" else found

    def to_frame(self) -> Table:
        return Table({self.name or "": self._values})


NAN = float("nan")
WORD_TABLE = Table({"area": [1.0] * 12, "city": ["Oslo"] * 12, "sold": [None] * 12})
NAN_TABLE = Table({"area": [1.0, NAN] * 6, "rooms": [1.0] * 12, "age": [1.0] * 11 + [NAN], "floor": [2.0] * 12})
WORDS = r"X holds object values in column 'city' \(Oslo\), 'sold' \(None\); it must hold numbers"


def test_columns_of_a_table_that_hold_no_numbers_are_named_in_every_call():
    trainer: Any = trainer_of()
    for call, words in {
        lambda: trainer.fit(WORD_TABLE, TARGETS): f"^{WORDS}",
        lambda: trainer.fit({"x": WORD_TABLE}, TARGETS): r"^X\['x'\] holds object values in column 'city'",
        lambda: trainer.fit(INPUTS, TARGETS, validation_data=(WORD_TABLE, TARGETS)): f"^validation data: {WORDS}",
        lambda: trainer.evaluate(WORD_TABLE, TARGETS): f"^{WORDS}",
        lambda: trainer.predict(WORD_TABLE): f"^{WORDS}",
        lambda: trainer.fit(
            INPUTS, WORD_TABLE["city"]
        ): r"^y holds object values \(Oslo\).*numpy\.unique\(y, return_inv",
        lambda: trainer.fit(Table({"a": [1] * 12, "b": [True] * 12}), TARGETS): r"different kinds: give X\.astype",
        lambda: trainer.fit(
            INPUTS, Series("age", [1.0, NAN] * 6)
        ): r"float64, with NaN in 6 samples \(first in sample 1\): drop",
    }.items():
        with one_process(), pytest.raises(cx.ConfigError, match=words):
            call()


def test_numpys_code_for_classes_makes_class_numbers():
    _, numbers = np.unique(np.asarray(WORD_TABLE["city"]), return_inverse=True)
    assert numbers.tolist() == [0] * 12


def warnings_of_nan_table() -> list[str]:
    with warning_texts() as caught:
        data: Any = (NAN_TABLE, TARGETS)
        trainer_of().fit(*data, validation_data=data, epochs=1, verbose=False, on_nonfinite="skip")
    return caught


def test_columns_of_a_table_that_hold_nan_are_named_whichever_rank_finds_them():
    first, second = run_world(2, warnings_of_nan_table)
    where = "sample 1 of X holds nan, the first of 6 such samples (column 'area', 'age')"
    assert first[0].startswith(f"{where}. on_nonfinite")
    assert first[1].startswith(f"validation data: {where}")
    assert second == []


@pytest.mark.parametrize(
    ("y", "code"),
    [
        (NUMBERS[:, 0], "y.reshape(-1, 1)"),
        (NUMBERS[:, 0].numpy(), "y.reshape(-1, 1)"),
        (NUMBERS[:, 0].tolist(), "numpy.asarray(y).reshape(-1, 1)"),
        (Series(None, NUMBERS[:, 0].tolist()), "numpy.asarray(y).reshape(-1, 1)"),
        (Series("price", NUMBERS[:, 0].tolist()), "df[['price']]"),
    ],
)
def test_advice_for_a_column_works_for_the_y_that_was_passed(y, code):
    with one_process():
        with pytest.raises(cx.ConfigError, match=re.escape(f"{TABLE}. Give {code} as y, or return output.squeeze(-1)")):
            regression().fit(INPUTS, y)
        column = y.to_frame() if code.startswith("df") else eval(code, {"y": y, "numpy": np})
        regression().fit(INPUTS, column, epochs=1, verbose=False)
        with pytest.raises(
            cx.ConfigError, match=re.escape(f"{TABLE}. Give numpy.asarray(y).reshape(-1) as y, or return")
        ):
            regression(nn.Flatten(0)).fit(INPUTS, column)


def test_what_replaces_an_argument_of_the_trainer_is_used():
    with one_process():
        trainer: Any = trainer_of(make_model(outputs=1), "mse")
        trainer.train_on_batch(INPUTS, NUMBERS)
        trainer.loss_fn = "mae"
        trainer.metrics = ["mae", "mse"]
        seen: list[int] = []
        trainer.callbacks = cx.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
        history = trainer.fit(INPUTS, NUMBERS, epochs=2, verbose=False)
        assert history.train_losses == pytest.approx(history.history["mae"])
        assert seen == [0, 1]
        assert trainer.train_on_batch(INPUTS, NUMBERS, return_dict=True).keys() == {"loss", "mae", "mse"}
        with pytest.raises(cx.ConfigError, match="no loss 'mean_squared'"):
            trainer.loss_fn = "mean_squared"


class Own(cx.DistributedTrainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lr = 0.5  # a subclass may have it, and reads it itself

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch)


def test_a_trainer_keeps_notes_under_names_that_mean_nothing():
    Own(make_model(), "cross_entropy").lr = 0.25
    trainer: Any = trainer_of()
    trainer.note = 3
    assert trainer.note == 3
