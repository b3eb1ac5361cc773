"""The models, losses, optimizers and schedules of random programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import cyxtrain as cx

from .rows import CLASSES, IGNORED, dtype_of
from .spec import Spec

HIDDEN = 6


def _norm(kind: str) -> list[nn.Module]:
    if kind == "ln":
        return [nn.LayerNorm(HIDDEN)]
    if kind == "bn_eval":
        return [nn.BatchNorm1d(HIDDEN).eval()]
    if kind == "bn":  # two values per channel: PyTorch refuses one, which a batch of one row would have
        return [nn.Unflatten(1, (HIDDEN // 2, 2)), nn.BatchNorm1d(HIDDEN // 2), nn.Flatten()]
    return []


class Perceptron(nn.Module):
    """Two layers and a head, with one peculiarity: see `_add`."""

    seen: Tensor
    again: Any

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.kind, self.loss = spec.model, spec.loss
        more = _norm(self.kind)
        if spec.dropout:
            more.append(nn.Dropout(spec.dropout))
        first, second = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.body = nn.Sequential(first, nn.Tanh(), *more, second, nn.Tanh())
        self.head = nn.Linear(HIDDEN, {"reg": 2, "bin": 1}.get(spec.task, CLASSES))
        self._add(first, second)

    def _add(self, first: nn.Linear, second: nn.Linear) -> None:
        if self.kind in ("tied", "branch", "twice"):
            self.again = nn.Linear(HIDDEN, HIDDEN)
        if self.kind == "tied":
            self.again.weight = second.weight
        if self.kind == "frozen":
            first.requires_grad_(False)
        if self.kind == "unused":
            self.spare = nn.Linear(2, 2)
        if self.kind == "complex":
            parts = torch.randn(2, HIDDEN, HIDDEN)
            self.mixing = nn.Parameter(torch.complex(*parts) / HIDDEN)
        if self.kind == "buffer":
            self.register_buffer("seen", torch.zeros(HIDDEN))
        if self.kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        hidden = self._special(self.body(x), x)
        scores = self.head(hidden)
        if not self.loss.startswith("own"):
            return scores
        if labels is None:
            return {"logits": scores}
        return {"logits": scores} | _own_losses(self.loss, scores, labels)

    def _special(self, hidden: Tensor, x: Tensor) -> Any:
        if self.kind == "tied":
            return self.again(hidden).tanh()
        if self.kind == "twice":
            return self.again(self.again(hidden).tanh()).tanh()
        if self.kind == "complex":
            return (hidden.to(self.mixing.dtype) @ self.mixing).abs().square()
        if self.kind == "scalar":
            return hidden * self.scale
        if self.kind == "branch" and bool((chosen := x[:, 0] > 0.8).any()):
            return torch.where(chosen[:, None], self.again(hidden).tanh(), hidden)
        if self.kind == "buffer":  # a mean over rows as the previous step left it: the same on any number of ranks
            shifted = hidden - self.seen.clone()
            if self.training:
                self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            return shifted
        return hidden


def _own_losses(kind: str, scores: Tensor, labels: Tensor) -> dict[str, Any]:
    loss = F.cross_entropy(scores, labels)
    if kind == "own_pair":
        counted = labels != 1
        return {"loss": ((F.cross_entropy(scores, labels, reduction="none") * counted).sum(), counted.sum())}
    if kind == "own_two":
        return {"ce": loss, "penalty": 0.1 * scores.square().mean()}
    if kind == "own_more":
        hits = ((scores.argmax(1) == labels).sum(), len(scores))
        return {"loss": loss, "size": scores.abs().mean(), "hits": hits}
    return {"loss": loss}


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(2, 4, 3, padding=1)
        self.layers = nn.Sequential(first, nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(x))
        return scores


class Text(nn.Module):
    """A class for each text, or for each token."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.task, self.loss = spec.task, spec.loss
        self.embed = nn.Embedding(13, HIDDEN, padding_idx=0, sparse=spec.model == "sparse")
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, batch_first=True) if spec.model == "lstm" else None
        self.layer = None
        if spec.model == "transformer":
            self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, 8, dropout=spec.dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, 5 if spec.task == "tok" else CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> Any:
        counted = input_ids != 0
        hidden = self.embed(input_ids)
        if self.rnn is not None:
            lengths = counted.sum(1).clamp(min=1)
            packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, True, enforce_sorted=False)
            found = self.rnn(packed)[0]
            hidden, _ = nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=hidden.shape[1])
        if self.layer is not None:
            hidden = self.layer(hidden, src_key_padding_mask=~counted)
        if self.task == "seq":
            return self.head((hidden * counted[..., None]).sum(1) / counted.sum(1, keepdim=True).clamp(min=1))
        scores = self.head(hidden)
        if not self.loss.startswith("own"):
            return scores.transpose(1, 2)
        if labels is None:
            return {"logits": scores}
        total, count = sum_of_tokens(scores.transpose(1, 2), labels)
        if self.loss == "own_tok_pair":
            return {"loss": (total, count), "logits": scores}
        return {"loss": total / (count if num_items_in_batch is None else num_items_in_batch), "logits": scores}


class TwoHeads(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.kind = spec.model
        self.body, self.c, self.r = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 1)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        hidden = torch.tanh(self.body(torch.cat([a, b], 1)))
        if self.kind == "tuple":
            return self.c(hidden), self.r(hidden)
        return {"c": self.c(hidden), "r": self.r(hidden)}


def make_model(spec: Spec) -> nn.Module:
    torch.manual_seed(7 + spec.data_seed)
    made: dict[str, Callable[[], nn.Module]] = {
        "conv": Convolution,
        "tok": lambda: Text(spec),
        "seq": lambda: Text(spec),
        "multi": lambda: TwoHeads(spec),
    }
    model = made.get(spec.task, lambda: Perceptron(spec))()
    if spec.dtype == "float64":
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return model


class Temperature(nn.Module):
    """A loss with a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores * self.temperature.exp(), labels) + 0.05 * self.temperature.square()


class Center(nn.Module):
    """A loss with a buffer."""

    center: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=dtype))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(scores - self.center, labels)
        if self.training:
            self.center.mul_(0.9).add_(scores.detach().mean(0), alpha=0.1)
        return loss


def sum_of_classes(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    counted = (labels != 1).to(scores.dtype)
    return (F.cross_entropy(scores, labels, reduction="none") * counted).sum(), counted.sum()


def sum_of_tokens(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def sum_of_numbers(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = (target > -0.5).to(output.dtype)
    return ((output - target).square() * counted).sum(), counted.sum()


def penalized(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels) + 0.01 * scores.square().mean()


def loss_of_each(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loss_of_both(output: Any, target: dict[str, Tensor]) -> Tensor:
    classes, numbers = output.values() if isinstance(output, dict) else output
    return F.cross_entropy(classes, target["c"]) + F.mse_loss(numbers, target["r"])


def _single_losses(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    weights = torch.tensor([0.3, 1.0, 2.5], dtype=dtype)
    ce = functools.partial(functools.partial, nn.CrossEntropyLoss)
    return {
        "ce": lambda: "cross_entropy",
        "nn_ce": ce(),
        "ce_w": ce(weights),
        "ce_ign": ce(ignore_index=1),
        "ce_w_ign": ce(weights, ignore_index=2),
        "ce_ls": ce(label_smoothing=0.1),
        "ce_w_ls": ce(weights, label_smoothing=0.1),
        "ce_ign_ls": ce(ignore_index=0, label_smoothing=0.2),
        "ce_sum": ce(reduction="sum"),
        "ce_none": ce(reduction="none"),
        "f_ce": lambda: F.cross_entropy,
        "fn_mean": lambda: penalized,
        "fn_rows": lambda: loss_of_each,
        "fn_pair": lambda: sum_of_classes,
        "mod_param": lambda: Temperature(dtype),
        "mod_buf": lambda: Center(dtype),
        "mm": nn.MultiMarginLoss,
        "mm_w": lambda: nn.MultiMarginLoss(weight=weights),
        "mse": lambda: "mse",
        "nn_mse": nn.MSELoss,
        "l1": nn.L1Loss,
        "huber": nn.HuberLoss,
        "smooth": nn.SmoothL1Loss,
        "mse_sum": lambda: nn.MSELoss(reduction="sum"),
        "mse_none": lambda: nn.MSELoss(reduction="none"),
        "mse_fn": lambda: squared,
        "mse_pair": lambda: sum_of_numbers,
        "bce": lambda: "bce_with_logits",
        "bce_pw": lambda: nn.BCEWithLogitsLoss(pos_weight=weights[2:]),
        "bce_sum": lambda: nn.BCEWithLogitsLoss(reduction="sum"),
        "tok": ce(),
        "tok_pair": lambda: sum_of_tokens,
        "tok_ls": ce(label_smoothing=0.1),
    }


def _losses_of_outputs(dtype: torch.dtype) -> dict[str, tuple[dict[str, Any], dict[str, float] | None]]:
    weighted = nn.CrossEntropyLoss(torch.tensor([0.3, 1.0, 2.5], dtype=dtype))
    return {
        "m": ({"c": "cross_entropy", "r": "mse"}, None),
        "m_w": ({"c": "cross_entropy", "r": "mse"}, {"r": 0.3}),
        "m_ign": ({"c": nn.CrossEntropyLoss(ignore_index=1), "r": "mse"}, {"c": 2.0}),
        "m_cw": ({"c": weighted, "r": nn.L1Loss()}, None),
        "m_pair": ({"c": sum_of_classes, "r": sum_of_numbers}, {"c": 0.5}),
        "m_none": ({"c": "cross_entropy", "r": None}, None),
        "m_sum": ({"c": "cross_entropy", "r": nn.MSELoss(reduction="sum")}, {"r": 0.05}),
    }


def make_loss(spec: Spec) -> tuple[Any, Any]:
    """Return loss_fn and loss_weights."""
    if spec.computes_loss:
        return None, None
    if spec.loss == "m_fn":
        return loss_of_both, None
    if spec.loss in (made := _single_losses(dtype_of(spec))):
        return made[spec.loss](), None
    return _losses_of_outputs(dtype_of(spec))[spec.loss]


class LoggedLoss:
    """A loss that logs numbers of every reduction."""

    def __init__(self, loss: Any) -> None:
        named: dict[str, Any] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
        self.loss: Any = named[loss] if isinstance(loss, str) else loss
        self.trainer: cx.DistributedTrainer | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        if self.trainer is not None:
            found = output.detach()
            self.trainer.log("logged_mean", found.abs().mean())
            self.trainer.log("logged_sum", found.sum(), reduce="sum")
            self.trainer.log("logged_max", found.max(), reduce="max")
            self.trainer.log("logged_weighted", found.square().mean(), weight=2 * len(found))
        return self.loss(output, target)


_optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: _optim.SGD(parameters, lr),
    "mom": lambda parameters, lr: _optim.SGD(parameters, lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters, lr: _optim.Adam(parameters, lr / 5, eps=1e-6),
    "adamw": lambda parameters, lr: _optim.AdamW(parameters, lr / 5, eps=1e-6),
    "amsgrad": lambda parameters, lr: _optim.Adam(parameters, lr / 5, eps=1e-6, amsgrad=True),
    "rms": lambda parameters, lr: _optim.RMSprop(parameters, lr / 20, eps=1e-5),
    "adagrad": lambda parameters, lr: _optim.Adagrad(parameters, lr, eps=1e-5),
    "nadam": lambda parameters, lr: _optim.NAdam(parameters, lr / 10, eps=1e-6),
    "adadelta": lambda parameters, lr: _optim.Adadelta(parameters, lr),
    "radam": lambda parameters, lr: _optim.RAdam(parameters, lr / 10, eps=1e-6),
    "adafactor": lambda parameters, lr: _optim.Adafactor(parameters, lr / 10),
    "asgd": lambda parameters, lr: _optim.ASGD(parameters, lr),
    "lbfgs": lambda parameters, lr: _optim.LBFGS(parameters, 0.1, max_iter=3, history_size=3),
    "lbfgs_wolfe": lambda parameters, lr: _optim.LBFGS(parameters, 0.3, max_iter=3, line_search_fn="strong_wolfe"),
    "maximize": lambda parameters, lr: _optim.SGD(parameters, lr / 50, maximize=True),
    "tensor_lr": lambda parameters, lr: _optim.Adam(parameters, torch.tensor(lr / 5), eps=1e-6),
}
"""Of one group of parameters. Large eps: a tiny gradient must not decide, by its rounding, about a full step."""
NAMED_OPTIMIZERS = ("name: adam", "name: sgd", "name: adamw")


def make_optimizers(spec: Spec, model: nn.Module, loss: Any) -> dict[str, Any]:
    """Return the keywords of a trainer."""
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    parameters = dict.fromkeys(each for module in modules for each in module.parameters() if each.requires_grad)
    trained: list[Any] = [*parameters]
    kind = spec.optimizer
    lr = spec.lr
    half = max(1, len(trained) // 2)
    if kind.startswith("name: "):
        return {"optimizer": kind.removeprefix("name: ")}
    if kind == "factory":
        return {"optimizer": lambda parameters: _optim.SGD(parameters, lr)}
    if kind in ("two", "two_mix"):
        second = _optim.SGD(trained[half:], lr) if kind == "two" else _optim.Adam(trained[half:], lr, eps=1e-6)
        return {"optimizers": {"p": _optim.SGD(trained[:half], lr, momentum=0.9), "q": second}}
    if kind == "groups":
        groups: list[dict[str, Any]] = [
            {"params": trained[:half]},
            {"params": trained[half:], "lr": lr / 3, "weight_decay": 0.01},
        ]
        return {"optimizer": _optim.SGD([group for group in groups if group["params"]], lr, momentum=0.5)}
    return {"optimizer": OPTIMIZERS[kind](trained, lr)}


_lrs = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: _lrs.StepLR(optimizer, 3, 0.7),
    "exp": lambda optimizer: _lrs.ExponentialLR(optimizer, 0.95),
    "multi": lambda optimizer: _lrs.MultiStepLR(optimizer, [2, 5], 0.5),
    "restarts": lambda optimizer: _lrs.CosineAnnealingWarmRestarts(optimizer, 4),
    "cyclic": lambda optimizer: _lrs.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "lambda": lambda optimizer: _lrs.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step)),
    "seq": lambda optimizer: _lrs.SequentialLR(
        optimizer, [_lrs.ConstantLR(optimizer, 0.5, 2), _lrs.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chain": lambda optimizer: _lrs.ChainedScheduler(
        [_lrs.ConstantLR(optimizer, 0.5, 3), _lrs.ExponentialLR(optimizer, 0.97)]
    ),
}
"""Those that do not know when the fit ends."""
FITTED_SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "fn_poly": lambda optimizer, total_steps: _lrs.PolynomialLR(optimizer, total_steps, power=2),
    "fn_cos": lambda optimizer, total_steps: _lrs.CosineAnnealingLR(optimizer, total_steps, eta_min=1e-3),
    "fn_one": lambda optimizer, total_steps: _lrs.OneCycleLR(
        optimizer, 0.1, total_steps=total_steps + 1, cycle_momentum=False
    ),
}
"""Those that end with the fit."""


def make_schedule(spec: Spec, optimizers: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a trainer."""
    kind = spec.scheduler
    if kind is None:
        return {}
    if "optimizers" not in optimizers:
        known: dict[str, Any] = {**FITTED_SCHEDULES, **SCHEDULES}
        return {"scheduler": known.get(kind, kind)}
    if kind in SCHEDULES:
        return {"schedulers": {name: SCHEDULES[kind](each) for name, each in optimizers["optimizers"].items()}}
    return {"schedulers": {"p": kind}}
