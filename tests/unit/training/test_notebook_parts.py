"""Claims about the parts of a call by workers, one by one in this process: errors, changes, workers kept, a call."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, make_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import cyxtrain as cx
from cyxtrain.environment import accelerator, process_env
from cyxtrain.notebook import run_in_workers, worker_cache
from cyxtrain.notebook.failures import Failed, WorkerTraceback, raised
from cyxtrain.notebook.pool import JobAnswers
from cyxtrain.notebook.sharing import read, shared_file, write
from cyxtrain.notebook.state_transfer import AttributeDigests, merge, parts_of
from cyxtrain.notebook.worker_calls import CallResult, enter, settings_here

CELL = "<a cell of these tests>"


class UnluckyError(ValueError):
    """Wants other arguments than it passes on."""

    def __init__(self, *, item: int) -> None:
        super().__init__(f"item {item} is wrong")
        self.item = item


def without_first(error: BaseException) -> BaseException:
    """Returns an error whose traceback goes without its first frame."""
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def caught(function: Callable[[], Any]) -> BaseException:
    """Returns what a function raises, with the traceback from the function on."""
    try:
        function()
    except BaseException as error:
        return without_first(error)
    raise AssertionError("nothing was raised")


def unlucky(_: Any = None) -> None:
    raise UnluckyError(item=3)


def chained(*, suppressed: bool) -> None:
    try:
        unlucky()
    except UnluckyError as error:
        if suppressed:
            raise KeyError("later") from None
        raise KeyError("later") from error


def test_an_error_arrives_as_itself_with_its_rank_and_its_traceback():
    failed = Failed.of(caught(unlucky))
    assert (failed.name, failed.message, failed.is_own, failed.about) == ("UnluckyError", "item 3 is wrong", True, None)
    error = raised(failed, 1, 4)
    assert isinstance(error, UnluckyError)
    assert (error.args, error.item) == (("item 3 is wrong",), 3)
    assert isinstance(error.__cause__, WorkerTraceback)
    told = str(error.__cause__)
    assert "on rank 1 of 4:\n" in told
    assert "in unlucky\n" in told
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["(on rank 1 of 4, in a worker process)"]


def test_attributes_of_an_error_that_cannot_be_sent_stay_behind():
    error = UnluckyError(item=3)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    arrived = raised(Failed.of(error), 0, 2)
    assert isinstance(arrived, UnluckyError)
    assert arrived.args == ("item 3 is wrong",)
    assert vars(arrived).keys() <= {"__notes__"}


def test_an_error_that_cannot_be_sent_at_all_is_told_in_words():
    failed = Failed.of(ValueError(threading.Lock()))
    assert failed.error is None
    error = raised(failed, 1, 2)
    assert isinstance(error, cx.DistributedTrainingError)
    assert error.rank == 1
    assert "rank 1 has failed: ValueError: <unlocked" in str(error)


def test_a_traceback_begins_where_the_users_code_does():
    error = caught(lambda: tree_map(unlucky, [1]))
    told = Failed.of(without_first(error)).text
    assert "in unlucky" in told
    assert "_pytree" not in told


def test_an_error_of_ours_without_the_users_code_says_all_and_one_of_others_is_told_whole():
    ours = Failed.of(cx.PeerLostError("rank 1 has ended", rank=1))
    assert (ours.text, ours.about, ours.is_own) == ("", 1, False)
    assert raised(ours, 0, 2).__cause__ is None
    assert Failed.of(ValueError("no traceback")).text == "ValueError: no traceback\n"


@pytest.mark.parametrize("suppressed", [False, True])
def test_what_led_to_an_error_is_told_unless_it_was_suppressed(suppressed):
    told = Failed.of(caught(lambda: chained(suppressed=suppressed))).text
    assert "KeyError: 'later'" in told
    assert ("\nwhich led to:\n" in told, "in unlucky" in told) == (not suppressed, not suppressed)


def test_lines_of_cells_are_added_to_a_traceback_that_came_without_them(monkeypatch):
    monkeypatch.setitem(linecache.cache, CELL, (9, None, ["first\n", "    second()\n"], CELL))
    text = (
        f'  File "{CELL}", line 2, in <module>\n  File "{CELL}", line 7, in f\n  File "here", line 1, in g\n    own\n'
    )
    told = str(raised(Failed(None, "E", "m", text, True, None), 0, 2).__cause__)
    assert 'line 2, in <module>\n    second()\n  File "<a cell' in told
    assert 'line 7, in f\n  File "here", line 1, in g\n    own\n' in told


def trainer_of(model: nn.Module | None = None) -> cx.DistributedTrainer:
    model = model or nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
    return cx.DistributedTrainer(model, "mse", optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def mirrored(prepare: Callable[[Any], Any], change: Callable[[Any], Any]) -> cx.DistributedTrainer:
    """Returns a trainer to which was done what was done to another one that had been the same."""
    there, here = trainer_of(), trainer_of()
    prepare(there), prepare(here)
    digests = AttributeDigests(there, parts_of(there), {})
    change(there)
    changes, parts = digests.changes()
    with shared_file() as path:
        write(changes, path, parts)
        own = parts_of(here)
        merge(read(path, own, mapped=False), here, own)
    return here


def test_changed_weights_buffers_and_flags_are_the_others_in_place():
    kept: dict[int, Tensor] = {}

    def change(trainer: Any) -> None:
        trainer.model[0].weight.data.fill_(2)
        trainer.model[0].bias.requires_grad_(False)
        trainer.model[1].running_mean.fill_(3)

    here = mirrored(lambda trainer: kept.update({id(each): each for each in trainer.model.parameters()}), change)
    model: Any = here.model
    assert all(id(each) in kept for each in model.parameters())
    assert (model[0].weight == 2).all()
    assert (model[1].running_mean == 3).all()
    assert (model[0].bias.requires_grad, model[0].weight.requires_grad) == (False, True)


def test_a_parameter_and_a_buffer_of_another_shape_replace_the_earlier_ones():
    def change(trainer: Any) -> None:
        trainer.model[0].weight = nn.Parameter(torch.ones(2, FEATURES), requires_grad=False)
        trainer.model[1].running_mean = torch.full((7,), 5.0)
        trainer.model[1].register_buffer("extra", torch.arange(3))
        trainer.model[1].running_var = None

    model: Any = mirrored(lambda _: None, change).model
    assert torch.equal(model[0].weight, torch.ones(2, FEATURES))
    assert isinstance(model[0].weight, nn.Parameter)
    assert not model[0].weight.requires_grad
    assert model[1].running_mean.tolist() == [5.0] * 7
    assert model[1].extra.tolist() == [0, 1, 2]
    assert model[1].running_var is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: np.zeros(3), [1.0, 2.0, 3.0]),
        (lambda: torch.zeros(3), [1.0, 2.0, 3.0]),
        (lambda: np.zeros((3, 2)).T, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        (lambda: torch.zeros(3, 2).t(), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    ],
    ids=["array", "tensor", "array in pieces", "tensor in pieces"],
)
def test_an_array_that_was_written_to_stays_the_same_object_with_what_was_written(before, after):
    kept = []

    def prepare(trainer: Any) -> None:
        trainer.model[0].seen = before()
        kept.append(trainer.model[0].seen)

    def change(trainer: Any) -> None:
        seen = trainer.model[0].seen
        seen[...] = type(seen)(after) if isinstance(seen, Tensor) else after

    model: Any = mirrored(prepare, change).model
    assert model[0].seen is kept[1]
    assert model[0].seen.tolist() == after


def test_what_an_attribute_is_in_is_kept_where_its_kind_and_shape_are():
    def prepare(trainer: Any) -> None:
        module = trainer.model[0]
        module.a_list, module.a_dict, module.a_set, module.grown = [1], {1: 2}, {1}, torch.zeros(2)
        kept.append((module.a_list, module.a_dict, module.a_set, module.grown))

    def change(trainer: Any) -> None:
        module = trainer.model[0]
        module.a_list.append(2), module.a_dict.update({3: 4}), module.a_set.add(2)
        module.grown.data = torch.ones(3)

    kept: list[Any] = []
    module: Any = mirrored(prepare, change).model[0]
    assert (module.a_list, module.a_dict, module.a_set) == ([1, 2], {1: 2, 3: 4}, {1, 2})
    assert module.grown.tolist() == [1.0, 1.0, 1.0]
    now = module.a_list, module.a_dict, module.a_set, module.grown
    assert [one is other for one, other in zip(now, kept[1], strict=True)] == [True, True, True, False]


def test_an_attribute_that_shows_a_weight_shows_the_own_one():
    def change(trainer: Any) -> None:
        trainer.model[0].first = trainer.model[0].weight.detach()[0]

    model: Any = mirrored(lambda _: None, change).model
    model[0].weight.data.fill_(8)
    assert model[0].first.tolist() == [8.0] * FEATURES


def test_what_cannot_be_sent_back_is_named_in_a_warning_and_the_rest_arrives():
    def change(trainer: Any) -> None:
        trainer.model[0].lock, trainer.model[0].count = threading.Lock(), 3

    with pytest.warns(UserWarning, match=r"module 0 \(Linear\) has changed \.lock .* cannot be sent back: TypeError"):
        model: Any = mirrored(lambda _: None, change).model
    assert model[0].count == 3
    assert not hasattr(model[0], "lock")


def test_an_optimizers_state_is_the_others_in_the_tensors_that_were_there():
    kept: list[list[Tensor]] = []

    def prepare(trainer: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()
        kept.append([state["momentum_buffer"] for state in trainer.optimizer.state.values()])

    def change(trainer: Any) -> None:
        kept[0][0].fill_(4)
        trainer.optimizer.state[trainer.model[0].bias]["momentum_buffer"] = None
        trainer.optimizer.param_groups[0]["lr"] = 0.25

    here = mirrored(prepare, change)
    model: Any = here.model
    assert here.optimizer.state[model[0].weight]["momentum_buffer"] is kept[1][0]
    assert (kept[1][0] == 4).all()
    assert here.optimizer.state[model[0].bias]["momentum_buffer"] is None
    assert here.optimizer.param_groups[0]["lr"] == 0.25


class OnlyThere:
    """Cannot be made anew by who gets it."""

    def __init__(self) -> None:
        self.number = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("not here")


def test_what_cannot_be_made_anew_here_is_named_in_a_warning():
    with pytest.warns(UserWarning, match=r"has changed \.thing in the workers.*LookupError: not here"):
        model: Any = mirrored(lambda _: None, lambda trainer: setattr(trainer.model[0], "thing", OnlyThere())).model
    assert not hasattr(model[0], "thing")


def test_settings_are_taken_over_where_the_own_folder_was_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_here()
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    enter(settings)
    assert Path.cwd() == tmp_path


def test_changes_without_an_optimizer_leave_the_own_one_as_it_is():
    trainer = trainer_of()
    changes, parts = AttributeDigests(trainer, parts_of(trainer), {}).changes()
    before = {name: (state, [dict(each) for each in groups]) for name, (state, groups) in changes.optimizers.items()}
    rate_before = trainer.optimizer.param_groups[0]["lr"]
    trainer.optimizer.param_groups[0]["lr"] = 0.25
    changes.optimizers = {}
    merge(changes, trainer, parts)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25
    changes.optimizers = before
    merge(changes, trainer, parts)
    assert trainer.optimizer.param_groups[0]["lr"] == rate_before


class FakePool:
    """Takes the place of workers: it notes what is asked of it, and answers what it was given."""

    def __init__(self, num_processes: int, variables: dict[str, str], answers: JobAnswers | None = None) -> None:
        self.num_processes = num_processes
        self.variables = dict(variables)
        self.is_usable = True
        self.answers = answers
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("start")

    def close(self) -> None:
        self.asked.append("close")

    def run(self, *_: Any) -> JobAnswers:
        assert self.answers is not None
        return self.answers

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> worker_cache.Workers:
    """Workers of which no process is started, where this process may use two cores."""
    monkeypatch.setattr(worker_cache, "Pool", FakePool)
    monkeypatch.setattr(worker_cache, "usable_cores", lambda variables: 2)
    variables = {"A": "1"}
    monkeypatch.setattr(process_env, "to_pass_on", lambda: dict(variables))
    workers = worker_cache.Workers()
    workers._is_registered = True  # nothing of these tests is called when the process ends
    return workers


def test_workers_are_not_for_a_call_within_a_call_of_the_same_thread(kept):
    with kept.used_for("fit"), pytest.raises(cx.ConfigError, match="predict was called by a callback that stays"):
        kept.used_for("predict").__enter__()
    with kept.used_for("predict"):
        pass


def test_workers_stay_for_the_next_call_unless_others_are_wanted(kept):
    trainer = trainer_of()
    first, why = kept.pool(2, trainer)
    assert (why, first.asked) == ("2 processes are starting; they stay for the next calls", ["start"])
    assert kept.pool(2, trainer) == (first, "")
    with pytest.warns(UserWarning, match=r"num_processes=3, but this process may use 2 cores: workers share them"):
        second, why = kept.pool(3, trainer)
    assert "because there were 2;" in why
    assert first.asked == ["start", "close"]
    second.is_usable = False
    assert "because the previous ones have exited;" in kept.pool(2, trainer)[1]


def test_workers_are_others_where_a_file_was_edited_or_the_environment_is_another(kept, monkeypatch, tmp_path):
    trainer = trainer_of()
    (tmp_path / "mine_of_these_tests.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = Path(importlib.import_module("mine_of_these_tests").__file__ or "")
    kept.pool(2, trainer)
    kept._sources[str(file)] -= 1  # as if it had been written to since
    assert f"because {file} was edited: reload it here too" in kept.pool(2, trainer)[1]
    monkeypatch.setattr(process_env, "to_pass_on", lambda: {"A": "2"})
    assert "because the environment has changed: A;" in kept.pool(2, trainer)[1]


def test_workers_that_compute_on_gpus_decide_the_backend_and_may_be_more_than_cores(kept, recwarn):
    trainer = trainer_of()
    trainer._device = "cuda"
    pool, _ = kept.pool(3, trainer)
    assert pool.variables == {"A": "1"}
    assert not recwarn.list


def test_workers_compute_on_visible_gpus_unless_the_cpu_is_asked_for(kept, monkeypatch):
    trainer = trainer_of()
    assert not worker_cache.is_on_gpu(trainer)
    monkeypatch.setattr(accelerator, "visible", lambda: torch.device("cuda"))
    assert worker_cache.is_on_gpu(trainer)
    monkeypatch.setenv("DISTRIBUTED_BACKEND", "cpu")
    assert not worker_cache.is_on_gpu(trainer)
    monkeypatch.delenv("DISTRIBUTED_BACKEND")
    trainer._device = "cpu"
    assert not worker_cache.is_on_gpu(trainer)
    pool, _ = kept.pool(2, trainer)
    assert pool.variables == {"A": "1", "DISTRIBUTED_BACKEND": "cpu"}


@pytest.mark.parametrize(("device", "count"), [("auto", 5), ("cuda", 7)])
def test_auto_is_as_many_workers_as_the_cores_allow_or_as_there_are_gpus(monkeypatch, device, count):
    monkeypatch.setattr(run_in_workers, "ranks_by_cores", lambda variables: 5)
    monkeypatch.setattr(accelerator, "count", lambda: 7)
    trainer = trainer_of()
    trainer._device = device
    assert run_in_workers._num_workers(trainer, "predict", (), {"num_processes": "auto"}) == count


def made(answers: JobAnswers) -> tuple[Any, FakePool, cx.DistributedTrainer]:
    """Returns what a fit returns to which workers have answered so, the workers, and the trainer."""
    trainer, pool = trainer_of(), FakePool(2, {}, answers)
    rows = torch.zeros(4, FEATURES), torch.zeros(4, 4)
    call = run_in_workers._Call(trainer, "fit", rows, {"epochs": 1, "verbose": True, "num_processes": 2})
    return call.run_by(pool, "2 processes are starting"), pool, trainer  # type: ignore[arg-type]


def test_a_fit_says_why_workers_start_and_without_changes_returns_the_own_history(capsys):
    found, pool, trainer = made(JobAnswers({1: CallResult(None)}))
    assert found is trainer.history
    assert not pool.asked
    assert "2 processes are starting" in "".join(capsys.readouterr())


def test_workers_that_cannot_go_on_are_ended_and_their_error_is_raised(monkeypatch):
    failed = CallResult(Failed.of(UnluckyError(item=3)))
    ended: list[FakePool] = []
    monkeypatch.setattr(FakePool, "close", lambda pool: ended.append(pool))
    with pytest.raises(UnluckyError, match="item 3"):
        made(JobAnswers({0: CallResult(None), 1: failed}, can_continue=False))
    assert len(ended) == 1


def test_a_call_that_cannot_be_sent_for_no_reason_of_its_parts_is_named_in_general():
    trainer = trainer_of(make_model())
    assert run_in_workers._unsendable_part(trainer, (torch.zeros(2),), {"batch_size": 4}) == "a part of this call"
    assert run_in_workers._unsendable_part(trainer, (torch.zeros(2), threading.Lock()), {}) == "y"
