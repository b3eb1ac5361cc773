"""Draws programs from seeds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from .hooks import STEPS
from .models import FITTED_SCHEDULES, SCHEDULES
from .plain_loop import PLAIN_DATA, PLAIN_LOSSES, PLAIN_MODELS, PLAIN_SCHEDULES
from .ranks import TRANSPORTS
from .spec import ARRAYS, LISTS, PLAIN, RESUMES, STREAMS, Checks, Spec, words
from .variants import VARIANTS

_T = TypeVar("_T")
LOSSES = {
    "cls": "ce nn_ce ce_w ce_ign ce_w_ign ce_ls ce_w_ls ce_ign_ls ce_sum ce_none f_ce fn_mean fn_rows fn_pair "
    "mod_param mod_buf mm mm_w own own_pair own_two own_more",
    "reg": "mse nn_mse l1 huber smooth mse_sum mse_none mse_fn mse_pair",
    "bin": "bce bce_pw bce_sum",
    "conv": "ce ce_w ce_ign fn_pair",
    "tok": "tok tok_pair tok_ls own_items own_tok_pair",
    "seq": "ce ce_w ce_ign fn_pair",
    "multi": "m m_w m_ign m_cw m_pair m_none m_sum m_fn m_fn_tuple",
}
_TASKS_AND_LOSSES = [(task, loss) for task, losses in LOSSES.items() for loss in losses.split()]
_TEXT_MODELS = ("embed", "lstm", "transformer", "sparse")
_MODELS: dict[str, Sequence[str]] = {
    "conv": ["conv"],
    "multi": ["dict"],
    "tok": _TEXT_MODELS,
    "seq": _TEXT_MODELS,
}
_PERCEPTRONS = words("mlp mlp tied frozen unused branch complex twice buffer scalar ln bn_eval")
_OPTIMIZERS = words(
    "sgd mom adam adamw amsgrad rms adagrad nadam adadelta radam adafactor asgd groups two two_mix factory lbfgs "
    "lbfgs_wolfe maximize tensor_lr"
)
_METRICS = {
    "cls": "f1 auc top_2 precision matthews of_each of_all whole",
    "conv": "f1 whole",
    "seq": "f1_weighted whole of_each",
    "reg": "mae rmse r2 pearson spearman of_each of_all whole",
    "bin": "f1 auc average_precision whole",
    "tok": "f1",
    "multi": "by_output",
}
_WEIGHTED_LOSSES = "ce nn_ce ce_w ce_ign ce_w_ign ce_ls ce_sum f_ce fn_rows mse nn_mse l1 mse_sum mse_none bce tok m"
_OWN_RATES = ("one_cycle", "fn_one", "cyclic")
"""Schedules that set rates themselves: they cannot be scaled."""
_AT_ONCE = ("closure", "optimize_pair", "two")
"""Steps that need all rows of a step in one micro-batch."""
_LOGGED_LOSSES = words("ce fn_mean fn_pair mse mse_fn")


_RARE_VARIANTS = ("without_ema", "workers", "container", "no_validation")
"""The rarest first."""
_NOT_IN_PLAIN_LOOPS = words(
    "own_step second_fit load_best keep_best initial_epoch batches_between fast_dev_run group_by_length dropout "
    "metrics learning_rate_scaling precision dtype logs weighted_validation validation_steps"
)


def generate(seed: int) -> tuple[Spec, Checks]:
    """Return the program of a seed, and what is compared of it."""
    drawn = _Drawn(seed)
    checks = drawn.checks()
    return Spec(**drawn.fields), checks


class _Drawn:
    """The fields of a program, drawn one after the other: what comes later depends on what came before."""

    def __init__(self, seed: int) -> None:
        self._number = seed
        self._random = random.Random(f"program {seed}")
        self.fields: dict[str, Any] = {}
        self._rows_and_model()
        self._updates()
        self._data()
        self._lengths()
        self._validation()
        self._callbacks()
        self._settings()
        self._calls()
        if self._chance(0.15):
            self._make_repeatable()
        self._fit_together()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _choice(self, options: Sequence[_T]) -> _T:
        return self._random.choice(options)

    def _in_turns(self, name: str, options: Sequence[_T]) -> _T:
        """Return each option once in as many seeds as there are options: so that none is rare."""
        block, place = divmod(self._number, len(options))
        shuffled = random.Random(f"{name} {block}").sample(options, len(options))
        return shuffled[place]

    def _is(self, **fields: Any) -> None:
        self.fields |= fields

    def __getattr__(self, name: str) -> Any:
        return self.fields.get(name, getattr(Spec, name, None))

    # What is trained.

    def _rows_and_model(self) -> None:
        task, loss = self._in_turns("loss", _TASKS_AND_LOSSES)
        sizes = [self._random.randrange(1, 12), *(self._random.randrange(5, 60) for _ in range(2))]
        self._is(
            task=task,
            loss=loss.removesuffix("_tuple"),
            rows=self._choice([*sizes, self._random.randrange(40, 130)]),
            data_seed=self._random.randrange(1000),
            seed=self._choice([42, 0, self._random.randrange(10**6)]),
            model="tuple" if loss.endswith("tuple") else self._choice(_MODELS.get(task, _PERCEPTRONS)),
            lr=self._choice([0.1, 0.05, 0.2]) / (30 if loss.endswith("_sum") else 1),
        )
        if self._chance(0.18):
            self._round_or_draw()

    def _round_or_draw(self) -> None:
        """Make the program one that differs on each number of ranks, and must be resumed to the bit."""
        if self.task in ("cls", "reg") and self.model == "mlp":
            self._is(dropout=0.3)
        if self.task in ("cls", "reg") and self._chance(0.3):
            self._is(model="bn")
        if self._chance(0.75) and self.model != "complex":
            self._is(dtype="float32", precision=self._choice(["fp32", "bf16", "fp16"]))

    def _updates(self) -> None:
        kind = self._in_turns("optimizer", [*_OPTIMIZERS, "name: adam", "name: sgd", "name: adamw"])
        if self.model == "sparse":
            kind = self._choice(["sgd", "factory", "name: sgd"])
        if self.model == "complex" and kind in (
            "adafactor",
            "rms",
            "radam",
            "asgd",
            "nadam",
            "name: adam",
            "name: adamw",
        ):
            kind = "adam"
        if kind.startswith("lbfgs") and self.precision != "fp32":
            kind = "adam"
        self._is(optimizer=kind)
        is_simple = self.task in ("cls", "reg") and not self.loss.startswith("own") and self.precision == "fp32"
        if is_simple and self._chance(0.7):
            self._own_step()
        if self._chance(0.45):
            self._schedule()
        if self._chance(0.2):
            self._is(warmup_steps=self._choice([1, 3, 5, 0.2]))
        if self._chance(0.3) and not self.optimizer.startswith("lbfgs"):
            self._clipping()

    def _own_step(self) -> None:
        own = self._in_turns("own step", [*STEPS, "penalty", "built_in_optimize", "test_step"])
        if own in ("penalty", "built_in_optimize") and self.loss.endswith("_sum"):  # the built-in step returns a mean
            own = "loss"
        # A weighted mean and a mean over rows, added by the user, have no weight in common.
        if own == "penalty" and self.loss in ("ce_w", "ce_ign", "ce_w_ign", "ce_w_ls", "ce_ign_ls", "mm_w"):
            own = "loss"
        if own == "two" and self.model == "buffer":  # its second forward sees a buffer of its own rank's rows
            own = "in_turns"
        self._is(own_step=own)
        if own in ("two", "in_turns", "retain_graph"):
            self._is(optimizer=self._choice(["two", "two_mix"]))
        elif own == "closure":
            self._is(optimizer=self._choice(["lbfgs", "sgd", "lbfgs_wolfe"]))
        elif "optimize" in own and self.optimizer.startswith(("two", "lbfgs")):
            self._is(optimizer="adam")

    def _schedule(self) -> None:
        kind = self._choice(["constant", "linear", "cosine", "one_cycle", *SCHEDULES, *FITTED_SCHEDULES])
        if self.optimizer.startswith("two") and kind not in ("linear", "cosine"):
            kind = self._choice(["linear", "cosine", "step", "exp"])
        if self.optimizer in ("maximize", "tensor_lr"):
            kind = self._choice(["linear", "exp"])
        self._is(scheduler=kind, scheduler_interval=self._choice(["step", "step", "epoch"]))

    def _clipping(self) -> None:
        kind, limit = self._choice([("norm", 0.5), ("norm", 0.1), ("value", 0.05), ("adaptive", 0.05)])
        if self.model == "complex" and kind == "value":
            kind, limit = "norm", 0.3
        is_one_of_two = self.optimizer.startswith("two") and self._chance(0.5)
        self._is(clip=(kind, {"p": limit} if is_one_of_two else limit))

    # The data.

    def _data(self) -> None:
        is_named = self.task == "multi" or self.loss.startswith("own")
        is_text = self.task in ("tok", "seq")
        kinds = ["tensors", "tensors", "numpy", "mapds", "loader", "loader", "loader_own", "loader_state"]
        kinds += ["loader_subset", "loader_weighted", *([] if self.own_step in _AT_ONCE else LISTS)]
        if not is_named:
            kinds += ["tds", *(["loader_pad"] * 7 if is_text else ["dictds"])]
        data = self._choice(kinds)
        self._is(data=data)
        if data.startswith("loader") and self._chance(0.2):
            self._is(workers=1 if data == "loader_stream" else self._choice([1, 2]))
        self._weights()
        if data in LISTS:
            self._is(batch=("list", self._random.randrange(1, 6)))
        elif self._chance(0.2):
            self._is(batch=("per", 6 * self._random.randrange(1, 4)))
        else:
            sizes = [self._random.randrange(1, 8), self._random.randrange(2, 17), self._random.randrange(4, 33)]
            self._is(batch=("eff", self._choice(sizes)))
        if data not in LISTS:
            self._is(drop_last=self._chance(0.12))
            if self.own_step not in _AT_ONCE:
                self._is(accumulation_steps=self._choice([1, 1, 1, 1, 2, 3]))
        self._is(shuffle=not self._chance(0.2))
        if data == "loader_pad" and self._chance(0.8):
            self._is(group_by_length=self._choice(["true", "true", "true", "lengths", "function"]))
        elif (data in ARRAYS or data == "loader") and self._chance(0.12):
            self._is(group_by_length="lengths" if data in ("tensors", "numpy") else "function")

    def _weights(self) -> None:
        can_weigh = self.loss in _WEIGHTED_LOSSES.split() and self.own_step is None
        if can_weigh and self.data in ("tensors", "numpy", "tds", "mapds", "loader") and self._chance(0.25):
            self._is(sample_weight=True)
        if can_weigh and self.task == "cls" and self.data in ("tensors", "numpy", "loader"):
            self._is(class_weight=True)

    def _lengths(self) -> None:
        self._is(epochs=self._choice([1, 2, 3, 3, 4]))
        if self._chance(0.15):
            self._is(max_steps=self._random.randrange(1, 15))
            if self.data in STREAMS:
                self._is(epochs=3)
        if self._chance(0.18):
            self._is(steps_per_epoch=self._random.randrange(1, 8))
        if self._chance(0.05):
            self._is(initial_epoch=self._random.randrange(self.epochs))
        if self.batch[0] == "eff" and self.scheduler not in _OWN_RATES and self._chance(0.1):
            self._is(learning_rate_scaling=self._choice(["linear", "sqrt"]))

    # What watches.

    def _validation(self) -> None:
        if not self._chance(0.5):
            if self._chance(0.08):
                self._is(keep_best="loss", load_best=self._chance(0.5))
            return
        kinds = ["pair", "loader", "named"]
        if self.data in ("tensors", "numpy"):
            kinds = ["pair", "split", "split", "split_groups", "split_groups"]
            if self.task in ("cls", "conv", "seq") and not self.loss.startswith("own"):
                kinds += ["split_stratified"] * 4
        kind = self._choice(kinds)
        if self.loss.startswith("own") and kind in ("pair", "named"):
            kind = "loader"
        self._is(validation=kind, validation_freq=self._choice([1, 1, 1, 2, [1, 3], 0.5, 0.34]))
        if self._chance(0.2):
            self._is(validate_every_n_steps=self._random.randrange(1, 7), validation_freq=1)
        if self._chance(0.15):
            self._is(validation_steps=self._random.randrange(1, 4))
        if self._chance(0.2) and kind != "loader":
            self._is(validation_batch_size=self._random.randrange(1, 9))
        can_weigh = self.loss in _WEIGHTED_LOSSES.split() and self.own_step is None and self.task != "multi"
        if kind == "pair" and can_weigh and self._chance(0.6):
            self._is(weighted_validation=True)
        if self._chance(0.3):
            self._is(keep_best=self._choice(["val_loss", "loss", "val_loss"]), load_best=self._chance(0.5))

    def _callbacks(self) -> None:
        found: list[tuple[Any, ...]] = []
        monitors = ["loss", *(["val_loss"] * 3 if self.validation else [])]
        draw = self._random.randrange
        if self._chance(0.16):
            start = self._choice([0, 0, 3])
            found.append(("ema", self._choice([0.5, 0.9]), start, self._chance(0.4), self._chance(0.4)))
        elif self._chance(0.1):
            found.append(("swa", draw(3), self._chance(0.7), self._chance(0.7)))
        if self._chance(0.13):
            found.append(("early", self._choice(monitors), draw(3), self._chance(0.5), self._choice([0, 0.02])))
        sets_rates = self.scheduler or self.warmup_steps or self.optimizer.startswith("two")
        if self._chance(0.15) and not sets_rates:
            wait = draw(2)
            found.append(self._choice([("plateau", self._choice(monitors), wait, wait), ("rates",)]))
        if self._chance(0.06):
            found.append(("checkpoint", self._choice(monitors)))
        found += [(name,) for name in ("csv", "norm", "rate_monitor", "nan") if self._chance(0.05)]
        if self._chance(0.15):
            found.append(("logs", self._choice(["batch", "epoch", "batch epoch"])))
        if self._chance(0.08):
            found.append(("stop_at", *self._choice([("step", draw(1, 10)), ("epoch", draw(2))])))
        can_unfreeze = self.model == "frozen" and not self.optimizer.startswith(("two", "name", "factory", "lbfgs"))
        if can_unfreeze and self._chance(0.85):
            found.append(("unfreeze", draw(2)))
        is_plain = not (self.own_step or self.sample_weight or self.class_weight)
        logs = self.task in ("cls", "reg") and self.loss in _LOGGED_LOSSES and is_plain and self._chance(0.8)
        self._is(callbacks=tuple(found), logs=logs)
        has_output = not self.loss.startswith("own") and self.own_step in (None, "penalty", "dict")
        if has_output and self.model != "tuple" and self._chance(0.55):
            names = _METRICS[self.task].split()
            self._is(metrics=tuple(self._random.sample(names, min(len(names), draw(3, 6)))))

    def _settings(self) -> None:
        ddp: dict[str, Any] = {}
        if self._chance(0.3):
            ddp = {
                "find_unused_parameters": self._chance(0.7),
                "gradient_as_bucket_view": self._chance(0.5),
                "static_graph": self._chance(0.25),
                "bucket_size_mb": self._choice([25, 0.0001, 0.0003]),
            }
            ddp = {name: value for name, value in ddp.items() if self._chance(0.6)}
        compresses = self.own_step is None and self.model not in ("sparse", "complex") and self._chance(0.1)
        if compresses:
            ddp["compression"] = self._in_turns("compression", ["bf16", "fp16", "powersgd"])
        has_idle_head = self.loss == "m_none"
        if self.model in ("unused", "branch") or self.own_step or has_idle_head:
            ddp.pop("static_graph", None)
            if ddp:  # otherwise the trainer's own config allows them
                ddp["find_unused_parameters"] = True
        self._is(
            ddp=ddp,
            recomputes=self.task in ("cls", "reg", "conv") and self.model != "bn_eval" and self._chance(0.06),
            fused_optimizer=self._choice(["auto", "auto", "auto", False]),
            check_replicas_every_n_steps=self._choice([None, None, None, 1, 3, 0]),
        )

    def _calls(self) -> None:
        if self._chance(0.12):
            second = [{"epochs": 1}, {"epochs": 2}, {"max_steps": 3}, {"epochs": 2, "seed": 3}]
            self._is(second_fit=self._choice(second))
        if self._chance(0.1) and self.task != "multi":
            self._is(batches_between=self._random.randrange(1, 4))
        if self._chance(0.025):
            self._is(fast_dev_run=self._choice([1, 3]))
        self._is(
            evaluates_between=self._chance(0.25),
            predicts_to_folder=self._chance(0.08),
            evaluation_batch=self._choice([None, 1, 2, 3, 5, 7]),
            evaluates_loader=self._chance(0.15),
            notes_rows=not self._chance(0.15),
        )

    def _fit_together(self) -> None:
        """Change what `fit` refuses."""
        ends_with_fit = self.scheduler in ("linear", "cosine", "one_cycle", "constant", *FITTED_SCHEDULES)
        if ends_with_fit:
            self._is(batches_between=0)
            if self.data in STREAMS and not self.steps_per_epoch:
                self._is(steps_per_epoch=self._random.randrange(2, 6))
        if self.model == "lstm":
            self._is(precision="fp32")  # many CPUs have no LSTM of 16 bits for rows of one length
        name, size = self.batch
        per_step = size * (self.accumulation_steps if name == "per" else 1)
        if per_step > self.rows or self.data == "loader_subset":
            self._is(drop_last=False)
        has_no_length = self.data in LISTS and not self.steps_per_epoch
        if has_no_length and isinstance(self.warmup_steps, float):
            self._is(warmup_steps=2)
        if has_no_length and isinstance(self.validation_freq, float):
            self._is(validation_freq=1)
        if name == "per" and self.validation != "loader" and (self.validation_steps or self.fast_dev_run):
            self._is(validation_batch_size=4)  # the default is per rank

    def _make_repeatable(self) -> None:
        """Leave out what a plain loop does not do; see `can_repeat`."""
        self._is(
            **{name: getattr(PLAIN, name) for name in _NOT_IN_PLAIN_LOOPS},
            callbacks=tuple(each for each in self.callbacks if each[0] in ("csv", "norm", "nan", "logs")),
            validation=None if self.validation is None or self.loss.startswith("own") else "pair",
            scheduler_interval="step" if self.warmup_steps else self.scheduler_interval,
            ddp={name: value for name, value in self.ddp.items() if name != "compression"},
        )
        if self.data not in PLAIN_DATA:
            self._is(data="tensors", batch=("eff", self.batch[1] + 3), workers=0)
        if self.loss not in PLAIN_LOSSES:
            self._is(loss={"multi": "m", "reg": "mse", "tok": "tok"}.get(self.task, "ce_w"))
        if self.model not in PLAIN_MODELS:
            self._is(model={"multi": "dict", "tok": "lstm", "seq": "lstm"}.get(self.task, "mlp"))
        if self.optimizer.startswith(("lbfgs", "name: ")):
            self._is(optimizer="adam")
        if self.scheduler not in PLAIN_SCHEDULES:
            self._is(scheduler="linear")
        if self.clip and self.clip[0] == "adaptive":
            self._is(clip=("norm", 0.2))
        if isinstance(self.warmup_steps, float):
            self._is(warmup_steps=2)

    def _variant(self) -> str:
        """Return a variant that the program has; half of the time, one that few programs have."""
        possible = [name for name, vary in VARIANTS.items() if vary(Spec(**self.fields)) is not None]
        rare = [name for name in _RARE_VARIANTS if name in possible]
        return rare[0] if rare and self._chance(0.5) else self._choice(possible)

    def checks(self) -> Checks:
        """Return what is compared."""
        worlds = self._choice([(1, 2, 3), (1, 2), (1, 2), (1, 3), (1,), (1,)])
        resumes = {"path": 0.8, "twice": 0.4, "other": 0.4, "ctrl_c": 0.4, "longer": 0.35}
        assert {*resumes} == {*RESUMES}
        kinds = tuple(kind for kind, probability in resumes.items() if self._chance(probability))
        transport = self._in_turns("transport", [*TRANSPORTS, *([None] * 7)]) if 2 in worlds else None
        pool = 2 in worlds and self._chance(0.12)
        if pool:
            self._is(batches_between=0)  # which are of this process alone
        return Checks(
            worlds=worlds,
            size=self._choice([1, 2, 2, 3, 3]),
            plain_loop=self._chance(0.8),
            variant=self._variant() if self._chance(0.6) else None,
            transport=transport,
            pool=pool,
            resumes=kinds if self._chance(0.6) else (),
            save_every=self._choice([1, 1, 2, 3, 5]),
            seed=self._random.randrange(10**9),
        )
