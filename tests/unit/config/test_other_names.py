"""Claims about other libraries' names: they are answered by their meaning, and what is answered exists."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fitting import make_model, one_process
from lazy import LazyParameter, resolve
from torch import nn

import cyxtrain as cx
from cyxtrain.callbacks import Callback
from cyxtrain.config.other_names import _MEANINGS
from cyxtrain.config.settings import nearest, unknown_name
from cyxtrain.launch.starting import launch
from cyxtrain.metrics.named_losses import LOSSES
from cyxtrain.metrics.named_metrics import _KNOWN
from cyxtrain.optim.optimizers import OPTIMIZERS
from cyxtrain.optim.schedule_classes import SCHEDULERS
from cyxtrain.training.inputs.arguments import parse_fit

CONFIGS = (cx.DistributedTrainingConfig, cx.DDPConfig, cx.AMPConfig)
TRAINERS = (cx.DistributedTrainer, cx.DistributedAMPTrainer)
CALLS = (parse_fit, *TRAINERS, cx.DistributedTrainer.log, cx.callbacks.ModelCheckpoint, torch.optim.Adam)
OURS = {
    "hook": [name for name in dir(Callback) if name.startswith("on_")],
    "loss": [*LOSSES],
    "metric": _KNOWN,
    "optimizer": [*OPTIMIZERS],
    "scheduler": [*SCHEDULERS],
    "argument": [
        *(field.name for cls in CONFIGS for field in dataclasses.fields(cls)),
        *(name for call in CALLS for name in inspect.signature(call).parameters),
    ],
    "attribute": ["callbacks", "loss_fn", *(name for name in dir(cx.DistributedTrainer) if not name.startswith("_"))],
    "option": [name for parameter in launch.params for name in parameter.opts],
}

# Kind -> their name -> words of the answer.
ANSWERS = {
    "hook": {
        "on_train_start": "Did you mean 'on_train_begin'?",
        "on_save": "'on_checkpoint'",
        "on_fit_end": "'on_train_end'",
        "on_epoch_start": "'on_epoch_begin'",
        "on_train_epoch_start": "'on_epoch_begin'",
        "on_train_epoch_end": "'on_epoch_end'",
        "on_train_batch_start": "'on_train_batch_begin'",
        "on_batch_end": "'on_train_batch_end'",
        "on_step_begin": "'on_train_batch_begin'",
        "on_step_end": "'on_train_batch_end'",
        "on_validation_start": "'on_test_begin'",
        "on_validation_epoch_start": "'on_test_begin'",
        "on_validation_epoch_end": "'on_validation_end'",
        "on_validation_batch_start": "'on_test_batch_begin'",
        "on_validation_batch_end": "'on_test_batch_end'",
        "on_evaluate": "'on_test_end'",
        "on_before_zero_grad": "'on_train_batch_begin'",
        "on_after_backward": "'on_before_optimizer_step'",
        "on_before_backward": "no hook between forward and backward",
        "on_save_checkpoint": "state_dict()",
        "on_predict_start": "'on_predict_begin'",
        "on_predict_batch_start": "'on_predict_batch_begin'",
        "on_predict_epoch_end": "'on_predict_end'",
        "on_epoch_ends": "'on_epoch_end'",  # spelled wrongly
    },
    "loss": {
        "binary_crossentropy": "'bce_with_logits'? It takes outputs without a sigmoid",
        "BinaryCrossentropy": "'bce_with_logits'? It takes outputs without a sigmoid",
        "sparse_categorical_crossentropy": "'cross_entropy'? It takes outputs without a softmax",
        "categorical_crossentropy": "'cross_entropy'? It takes outputs without a softmax, and y as class indices",
        "CrossEntropyLoss": "'cross_entropy'?",
        "torch.nn.BCEWithLogitsLoss": "'bce_with_logits'?",
        "mean_squared_error": "'mse'",
        "keras.losses.MeanSquaredError": "'mse'",
        "mse_loss": "'mse'",
        "MAE": "'mae'",
        "mean_absolute_error": "'mae'",
        "Huber": "'huber'",
        "kld": "'kl_div'? It takes log-probabilities",
        "hinge": "Pass torch.nn.MultiMarginLoss()",
        "poisson": "Pass torch.nn.PoissonNLLLoss(log_input=False)",
        "mape": "a function of (output, y)",
        "adam": "the order is DistributedTrainer(model, loss_fn, optimizer)",
    },
    "metric": {
        "acc": "'accuracy'",
        "val_acc": "'accuracy'",
        "sparse_categorical_accuracy": "'accuracy'",
        "top_k_categorical_accuracy": "'top_5'? Any number will do",
        "f1_score": "'f1'",
        "F1Score": "'f1'",
        "roc_auc": "'auc'",
        "AUROC": "'auc'",
        "mean_absolute_error": "'mae'",
        "root_mean_squared_error": "'rmse'",
        "r2_score": "'r2'",
        "balanced_accuracy": "'recall_macro'? It is the mean over classes",
        "bleu": "Pass a function of all outputs and targets, as in metrics={'mine': cx.metrics.WholeSet(function)}.",
        "classification_report": "Pass metrics=[cx.metrics.ConfusionMatrix()], which draws it.",
        "mcc": "'matthews'",
    },
    "optimizer": {
        "adamw_torch": "'adamw'",
        "adamw_torch_fused": "'adamw'? fit uses PyTorch's fused kernel",
        "sparse_adam": "'sparseadam'",
        "n-adam": "'nadam'",
        "Muon": "PyTorch advises AdamW for the rest",
        "shampoo": "of another package",
        "lion": "of another package",
        "cross_entropy": "the order is DistributedTrainer(model, loss_fn, optimizer)",
    },
    "scheduler": {
        "CosineAnnealingLR": "'cosine'",
        "cosine_with_restarts": "CosineAnnealingWarmRestarts(optimizer, T_0=...)",
        "ReduceLROnPlateau": "cx.callbacks.ReduceLROnPlateau",
        "StepLR": "scheduler=StepLR(optimizer, 10)",
        "OneCycleLR": "'one_cycle'",
        "polynomial": "'linear'",
    },
    "attribute": {
        "compile": "Pass loss_fn, optimizer and metrics to DistributedTrainer(",
        "export": "torch.onnx.export(trainer.model",
        "predict_proba": "'predict'? Of scores, .argmax(1) has the classes",
        "partial_fit": "it continues training",
        "lr_find": "Call fit in a loop",
        "get_params": "trainer.config has the settings",
        "best_model_path": "keep_best='val_loss'",
        "local_rank": "cx.get_local_rank()",
        "is_local_main_process": "'is_master'",
        "losses": "'history'",
        "criterion": "'loss_fn'",
        "train": "'fit'",
        "test": "'evaluate'",
        "validate": "'evaluate'",
        "save": "'save_checkpoint'",
        "save_model": "cx.save_weights(trainer.model, path)",
        "load_weights": "cx.load_weights(trainer.model, path)",
        "get_weights": "trainer.model.state_dict()",
        "log_dict": "'log'? It takes one name",
        "manual_backward": "'optimize'? It does backward",
        "toggle_optimizer": "'optimize'",
        "configure_optimizers": "Pass loss_fn, optimizer and metrics",
        "global_step": "'step'",
        "should_stop": "'stop_training'",
    },
    "option": {
        "--nprocs": "'-n'? It counts the ranks on this machine",
        "--num-processes": "'-n'",
        "--num_machines": "'--nnodes'",
        "--main_process_port": "'--master-port'",
    },
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_names_of_other_libraries_are_answered_by_their_meaning(kind):
    found = {name: nearest(name, OURS[kind], kind) for name in ANSWERS[kind]}
    assert {name: text for name, text in found.items() if ANSWERS[kind][name] not in text} == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("on_epoch", "log has no argument 'on_epoch'. The history has one number per epoch, over all ranks: leave it"),
        ("prog_bar", "leave it out"),
        ("sync_dist", "leave it out"),
        ("reduce_fx", "Did you mean 'reduce'"),
        ("batch_size", "Did you mean 'weight'? None is the number of samples"),
        ("wieght", "Did you mean 'weight'"),
    ],
)
def test_log_answers_the_arguments_of_lightning(name, words):
    trainer: Any = cx.DistributedTrainer(make_model(), "mse")
    with pytest.raises(cx.ConfigError, match=re.escape(words)):
        trainer.log("x", 1.0, **{name: True})


def test_a_trainer_answers_the_calls_of_other_libraries():
    trainer: Any = cx.DistributedTrainer(make_model(), "mse")
    for call, words in (
        (
            lambda: trainer.compile("adam", "mse"),
            r"the trainer has no 'compile'. Pass loss_fn, optimizer and metrics to",
        ),
        (lambda: trainer.test(), r"the trainer has no 'test'. Did you mean 'evaluate'\?"),
        (lambda: trainer.batch_size, r"Did you mean 'config.batch_size'\?"),
    ):
        with pytest.raises(AttributeError, match=words):
            call()
    with pytest.raises(TypeError, match="optimizers is a dictionary: take one by name"):
        trainer.optimizers()
    assert getattr(trainer, "mine", None) is None
    trainer.mine = 1
    assert copy.copy(trainer).mine == 1


@pytest.mark.parametrize("kind", _MEANINGS)
def test_what_is_answered_exists_and_is_no_answer_to_itself(kind):
    for answer, names in _MEANINGS[kind].items():
        meant = answer.partition(": ")[0]
        assert " " in meant or meant in OURS[kind], answer
        assert meant not in names.split()


@pytest.mark.parametrize(
    ("name", "measured", "words"),
    [
        ("val_acc", ["loss", "accuracy", "val_loss", "val_accuracy"], "Did you mean 'val_accuracy'?"),
        ("acc", ["loss", "accuracy"], "Did you mean 'accuracy'?"),
        ("val_acc", ["loss", "accuracy"], "Did you mean 'accuracy'?"),
        ("eval_loss", ["loss", "val_loss"], "Did you mean 'val_loss'?"),
        ("validation_f1_score", ["f1", "val_f1"], "Did you mean 'val_f1'?"),
        ("train_loss", ["val_loss", "loss"], "Did you mean 'loss'?"),
        ("auc", ["loss", "val_loss"], "Known: loss, val_loss."),
    ],
)
def test_a_measured_number_is_found_by_other_names(name, measured, words):
    assert nearest(name, measured, "metric named") == words


LR = "The optimizer has it, as in torch.optim.Adam(model.parameters(), lr=0.01)."
FIRST = "fit, evaluate and predict take arrays, a Dataset or a DataLoader as their first argument."


@pytest.mark.parametrize(
    ("of_fit", "of_trainer", "names"),
    [
        (LR, LR, "lr learning_rate weight_decay"),
        ("Did you mean DistributedTrainer(loss_fn=...)?", "Did you mean 'loss_fn'?", "criterion loss"),
        ("Did you mean DistributedTrainer(scheduler=...)?", "Did you mean 'scheduler'?", "lr_scheduler"),
        ("Did you mean DistributedTrainer(device=...)?", "Did you mean 'device'?", "accelerator"),
        ("Did you mean 'epochs'?", "fit(epochs=...)?", "max_epochs num_epochs num_train_epochs"),
        ("Did you mean 'num_processes'?", "cyxtrain launch -n 4", "devices gpus num_devices nprocs nproc_per_node"),
        (
            "Did you mean 'validation_data'?",
            "fit(validation_data=...)?",
            "val_loader val_dataloaders validation_loader eval_dataset",
        ),
        ("Did you mean 'X'?", FIRST, "train_dataloader train_loader dataset"),
        ("cx.callbacks.EarlyStopping(", "cx.callbacks.EarlyStopping(", "patience early_stopping"),
        ("Did you mean 'clip_norm'?", "fit(clip_norm=...)?", "max_norm gradient_clip_val clip_grad_norm max_grad_norm"),
        (
            "Did you mean 'accumulation_steps'?",
            "fit(accumulation_steps=...)?",
            "accumulate_grad_batches gradient_accumulation_steps",
        ),
        ("Did you mean 'validation_split'?", "fit(validation_split=...)?", "validation_size val_split test_size"),
        ("Did you mean 'max_steps'?", "fit(max_steps=...)?", "total_steps num_steps num_train_steps"),
        ("Did you mean 'validate_every_n_steps'?", "fit(validate_every_n_steps=...)?", "eval_steps val_check_interval"),
        ("Did you mean 'batch_size'?", "fit(batch_size=...)?", "per_device_train_batch_size"),
        ("Did you mean 'resume'?", "fit(resume=...)?", "ckpt_path resume_from_checkpoint"),
        ("cx.callbacks.TensorBoard(", "cx.callbacks.TensorBoard(", "logger report_to"),
        ("A DataLoader has it", "A DataLoader has it", "num_workers"),
        ("PyTorch runs each step", "PyTorch runs each step", "steps_per_execution run_eagerly"),
        (
            "DistributedTrainer(train_step=...)? It is",
            "Did you mean 'train_step'? It is",
            "training_step",
        ),
        ("DistributedTrainer(test_step=...)?", "Did you mean 'test_step'?", "validation_step"),
        ("Pass optimizer= and scheduler=", "Pass optimizer= and scheduler=", "configure_optimizers"),
    ],
)
def test_arguments_of_other_trainers_are_answered_by_fit_and_by_the_trainer(of_fit, of_trainer, names):
    trainer: Any = cx.DistributedTrainer
    for name in names.split():
        with pytest.raises(cx.ConfigError) as caught:
            parse_fit(torch.zeros(2, 4), **{name: 1})
        assert f"fit has no argument '{name}'" in str(caught.value)
        assert of_fit in str(caught.value)
        with pytest.raises(cx.ConfigError) as caught:
            trainer(make_model(), **{name: 1})
        assert f"DistributedTrainer has no argument '{name}'" in str(caught.value)
        assert of_trainer in str(caught.value)


def test_every_public_call_answers_unknown_arguments():
    model = make_model()
    trainer: Any = cx.DistributedTrainer(model, "cross_entropy")
    amp: Any = cx.DistributedAMPTrainer
    stopping: Any = cx.callbacks.EarlyStopping
    reducing: Any = cx.callbacks.ReduceLROnPlateau
    keeping: Any = cx.callbacks.ModelCheckpoint
    rows = torch.zeros(2, 4)
    for call, words in (
        (lambda: trainer.evaluate(test_loader=rows), "evaluate has no argument 'test_loader'. Did you mean 'X'?"),
        (lambda: trainer.evaluate(rows, labels=rows), "Did you mean 'y'?"),
        (lambda: trainer.evaluate(rows, max_epochs=3), "Did you mean fit(epochs=...)?"),
        (lambda: trainer.predict(rows, y=rows), "predict has no argument 'y'. fit(X, y) and evaluate(X, y) take it"),
        (lambda: trainer.predict(rows, rows), "predict takes X by position, and got 2 arguments"),
        (lambda: trainer.predict(rows, rows), "fit(X, y) and evaluate(X, y) take it; predict takes X alone."),
        (lambda: trainer.evaluate(rows, rows, 32), "evaluate takes X, y by position, and got 3 arguments"),
        (lambda: amp(model, lr=0.1), "DistributedAMPTrainer has no argument 'lr'. Did you mean 'learning_rate'?"),
        (lambda: stopping(metric="val_loss"), "EarlyStopping has no argument 'metric'. Did you mean 'monitor'?"),
        (lambda: reducing(metric="loss"), "ReduceLROnPlateau has no argument 'metric'."),
        (lambda: keeping(dirpath="kept"), "ModelCheckpoint has no argument 'dirpath'. Did you mean 'filepath'?"),
        (lambda: keeping("kept", save_top_k=1), "Did you mean 'save_best_only'?"),
        (lambda: cx.DDPConfig(bucket_cap_mb=1), "Did you mean 'bucket_size_mb'?"),
        (lambda: cx.DistributedTrainingConfig(val_loader=1), "Did you mean fit(validation_data=...)?"),
    ):
        with pytest.raises(cx.ConfigError) as caught:
            call()
        assert words in str(caught.value)


def test_settings_of_other_objects_get_names_and_no_advice_for_calls():
    assert str(unknown_name("the optimizer 'adam'", "learning_rate", ["lr", "betas"], "setting")).endswith("mean 'lr'?")
    assert str(unknown_name("odd.npz", "labels", ["x_train", "x_test"], "array")).endswith("Known: x_test, x_train.")


@pytest.mark.parametrize(
    "arguments",
    [
        (LazyParameter(lambda: torch.optim.SGD(make_model().parameters(), 0.1)), nn.CrossEntropyLoss()),
        (torch.optim.SGD, nn.CrossEntropyLoss()),
        ("sgd", "cross_entropy"),
    ],
)
def test_a_loss_and_an_optimizer_that_are_swapped_are_told_in_one_line(arguments):
    given = map(resolve, arguments)
    with pytest.raises(cx.ConfigError, match=r"the order is DistributedTrainer\(model, loss_fn, optimizer\)") as caught:
        cx.DistributedTrainer(make_model(), *given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"scheduler": [make_model()]}, {"optimizer": [*make_model().parameters()]}])
def test_no_error_prints_a_long_object_on_several_lines(given):
    with pytest.raises(cx.ConfigError) as caught:
        cx.DistributedTrainer(make_model(), "cross_entropy", **given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


PYTORCHS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather", "reduce", "barrier")
PYTORCHS += ("send", "recv")
"""They have PyTorch's signatures, which PyTorch checks."""


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions, and the constructors and methods of classes, that take an argument."""
    for module in (cx, cx.callbacks, cx.datasets):
        for name in getattr(module, "__all__", ["load_digits"]):
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if name in (*PYTORCHS, "ReduceOp", "BackendType") or is_error or inspect.ismodule(value):
                continue
            yield name, value
            called_by_fit = name.endswith("Config") or (
                inspect.isclass(value) and issubclass(value, (cx.callbacks.Callback, torch.nn.Module))
            )
            for method in vars(value) if inspect.isclass(value) and not called_by_fit else ():
                if not method.startswith("_") and callable(getattr(value, method)):
                    yield f"{name}.{method}", getattr(value, method)


def test_an_unknown_argument_of_any_public_call_is_answered_as_fit_answers_it() -> None:
    given = {"DistributedDataParallel": (nn.Linear(1, 1),), "count_steps": (torch.ones(4, 2), torch.ones(4))}
    checked = 0
    for name, call in public_calls():
        if name in ("Callback", "DistributedTrainer.fit") or [*inspect.signature(call).parameters] in ([], ["self"]):
            continue  # Python's answer is that it takes none
        if inspect.isabstract(call):
            continue  # as is Python's answer to a class that one derives from
        with one_process(), pytest.raises(cx.ConfigError, match=r"has no (argument|field|hook named) 'a_banana'"):
            call(*given.get(name, ()), a_banana=1)
        checked += 1
    assert checked > 60


def test_too_many_arguments_by_position_are_answered_too() -> None:
    with pytest.raises(cx.ConfigError, match="init takes config by position, and got 2 arguments: name the others"):
        cx.init(None, 2)  # type: ignore[call-arg]
    with pytest.raises(cx.ConfigError, match=r"init has no argument 'rank': it belongs to cx.init"):
        cx.init(rank=0)  # type: ignore[call-arg]
    with pytest.raises(cx.ConfigError, match=r"Timer has no argument 'max_time'. Did you mean"):
        cx.callbacks.Timer(max_time=3)  # type: ignore[call-arg]
    with pytest.raises(cx.ConfigError, match=r"DistributedSampler has no argument 'random_state'. Did you mean 'seed'"):
        cx.DistributedSampler(8, random_state=3)  # type: ignore[call-arg]
