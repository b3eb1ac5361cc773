"""Several optimizers by name, `self.optimize` in a train_step, and optimizers that need a closure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import (
    FEATURES,
    SaveAt,
    adam,
    everywhere,
    fingerprint,
    flat,
    make_model,
    make_rows,
    one_process,
    run_new_world,
    run_world,
    seeded,
)
from markers import by_night
from refusals import warning_texts
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
RANKS = [2, by_night(4)]
ROWS = 13  # with 6 per step, the last step has one row: on several ranks, only rank 0 has rows
SETTINGS: dict[str, Any] = {"effective_batch_size": 6, "verbose": False}


def make_parts() -> nn.ModuleDict:
    """Returns a generator "g" and a discriminator "d", in float64."""
    with seeded():
        parts = {
            "g": nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES)),
            "d": make_model(outputs=1),
        }
        return nn.ModuleDict(parts).double()


def make_data(rows: int = ROWS) -> Tensor:
    return make_rows(rows)[0].double()


def gan_step(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Tensor]:
    """A step of two updates, with noise that the rows determine: the same on any number of ranks."""
    (real,) = batch
    generator, discriminator = trainer.model["g"], trainer.model["d"]
    fake = generator(torch.sin(9 * real))
    scores = torch.cat([discriminator(real), discriminator(fake.detach())])
    is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(scores)
    of_d = trainer.optimize(binary_cross_entropy_with_logits(scores, is_real), "d")
    scores = discriminator(fake)
    loss = binary_cross_entropy_with_logits(scores, torch.ones_like(scores), reduction="sum")
    of_g = trainer.optimize((loss, len(real)), "g")
    return {"d_loss": of_d, "g_loss": of_g}


def make_gan(step: Callable[..., Any] = gan_step, **options: Any) -> cx.DistributedTrainer:
    model = make_parts()
    optimizers = {
        "g": torch.optim.Adam(model["g"].parameters(), 0.02),
        "d": torch.optim.SGD(model["d"].parameters(), 0.1, 0.9),
    }
    return cx.DistributedTrainer(model, optimizers=optimizers, train_step=step, **options)


def outcome_of(trainer: cx.DistributedTrainer) -> dict[str, Any]:
    return {
        "parameters": flat(trainer.model.parameters()),
        "fingerprint": fingerprint(trainer.model),
        "metrics": {name: list(values) for name, values in trainer.history.metrics.items()},
        "losses": list(trainer.history.train_losses),
        "step": trainer.step,
        "rates": [group["lr"] for each in trainer.optimizers.values() for group in each.param_groups],
    }


def train_gan(options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    trainer = make_gan(**options)
    trainer.fit(make_data(), epochs=2, **SETTINGS, **settings)
    return outcome_of(trainer)


def assert_alike(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every rank has the numbers of one process, up to rounding, and the bits of rank 0."""
    assert len({each["fingerprint"] for each in ranks}) == 1
    for each in ranks:
        np.testing.assert_allclose(each["parameters"], alone["parameters"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(each["losses"], alone["losses"], rtol=1e-9)
        assert each["metrics"].keys() == alone["metrics"].keys()
        for name, values in each["metrics"].items():
            np.testing.assert_allclose(values, alone["metrics"][name], rtol=1e-9)
        assert (each["step"], each["rates"]) == (alone["step"], alone["rates"])


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with one_process():
        return function(*arguments)


def test_a_step_of_two_updates_is_that_of_a_loop_by_hand():
    trainer = make_gan()
    with one_process():
        trainer.fit(make_data(), epochs=1, shuffle=False, **SETTINGS)
    by_hand = make_gan()
    for real in make_data().split(6):
        fake = by_hand.model["g"](torch.sin(9 * real))
        ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        scores = torch.cat([by_hand.model["d"](real), by_hand.model["d"](fake.detach())])
        for name, make_loss in (
            ("d", lambda: binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros]))),  # noqa: B023
            ("g", lambda: binary_cross_entropy_with_logits(by_hand.model["d"](fake), ones)),  # noqa: B023
        ):
            by_hand.model.zero_grad()
            make_loss().backward()
            by_hand.optimizers[name].step()
    np.testing.assert_allclose(flat(trainer.model.parameters()), flat(by_hand.model.parameters()), rtol=1e-12)


@pytest.mark.parametrize("world_size", RANKS)
def test_a_gan_trains_alike_on_any_number_of_ranks(world_size):
    options, settings = {"schedulers": {"g": "cosine"}}, {"clip_norm": {"d": 0.05}}
    alone = run_alone(train_gan, options, settings)
    assert alone["step"] == 6
    assert {*alone["metrics"]} >= {"d_loss", "g_loss"}
    assert alone["rates"] == pytest.approx([0.0, 0.1])
    assert_alike(run_world(world_size, train_gan, options, settings), alone)
    free = run_alone(train_gan, options, {})
    assert not np.allclose(free["parameters"], alone["parameters"])  # the limit was that of "d"


def train_streamed() -> dict[str, Any]:
    """Returns the outcome of a fit on batches of which the last step has one for rank 1 alone, of two."""
    trainer, data = make_gan(), make_data()
    own = data.split(3)[cx.get_rank() :: cx.get_world_size()] if cx.get_world_size() > 1 else data.split(6)
    batches = [[each] for each in own]
    if cx.get_world_size() > 1:  # the last batch goes to rank 1
        batches = batches[:2] + ([[data[12:]]] if cx.get_rank() == 1 else [])
    trainer.fit(lambda: iter(batches), epochs=1, sharded_data=True, verbose=False)
    return outcome_of(trainer)


def test_the_first_rank_with_rows_leads_where_rank_0_has_none():
    assert_alike(run_world(2, train_streamed), run_alone(train_streamed))


def train_with_buffers() -> dict[str, Any]:
    """Returns the outcome of a fit with batch norm, in whose last step only rank 0 has rows."""
    model = make_parts()
    model["g"].insert(1, nn.BatchNorm1d(8).double())
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    trainer = cx.DistributedTrainer(model, optimizers=optimizers, train_step=gan_step)
    trainer.fit(make_data(14), epochs=3, **SETTINGS)
    return outcome_of(trainer)


def test_buffers_stay_alike_where_a_rank_has_no_rows():
    first, second = run_world(2, train_with_buffers)
    assert first["fingerprint"] == second["fingerprint"]
    assert first["losses"] == second["losses"]


def sometimes_step(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    """A step that updates by itself in every other step, and returns its loss in the others."""
    x, y = batch
    loss = cross_entropy(trainer.model(x), y)
    return loss if trainer.step % 2 else trainer.optimize(loss)


def train_sometimes() -> dict[str, Any]:
    model = make_model("float64")
    trainer = cx.DistributedTrainer(model, None, adam(model), train_step=sometimes_step)
    trainer.fit(*make_rows(ROWS), epochs=2, **SETTINGS)
    return outcome_of(trainer)


def test_a_step_may_update_by_itself_in_some_steps_alone():
    assert_alike(run_world(2, train_sometimes), run_alone(train_sometimes))


class UnfreezeLater(cx.callbacks.Callback):
    """Trains "g" from the second epoch on."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.trainer.model["g"].requires_grad_(epoch > 0)


def train_frozen(allow_unused: bool = True) -> dict[str, Any]:
    config = cx.DDPConfig(find_unused_parameters=allow_unused)
    trainer, noting = make_gan(ddp_config=config), Noting()
    trainer.model["g"].requires_grad_(False)
    trainer.fit(make_data(), epochs=2, callbacks=[UnfreezeLater(), noting], **SETTINGS)
    (first, _), *_, (before, _), (after, _), _, _ = noting.seen
    assert first == before == flat(make_parts()["g"].parameters()).tolist() != after
    return outcome_of(trainer)


def test_an_optimizer_whose_parameters_are_frozen_waits_until_a_callback_unfreezes_them():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = run_alone(train_frozen)
    assert_alike(run_world(2, train_frozen), alone)
    # The wrapper of the whole model, which is made anew then, does not take over what the optimizers' average.
    assert_alike(run_world(2, train_frozen, False), alone)


def of_one_graph(trainer: cx.DistributedTrainer, batch: Any) -> None:
    """Makes two updates from one graph."""
    (rows,) = batch
    loss = trainer.model["d"](trainer.model["g"](rows)).square().mean()
    trainer.optimize(loss, "g", retain_graph=True)
    if trainer.step % 3 == 1:
        trainer.optimize(loss, "d")


def train_one_graph(path: Path) -> list[dict[str, Any]]:
    """Returns the outcomes of a whole fit, and of one that resumed from its fourth step."""
    outcomes = []
    for settings in ({"callbacks": [SaveAt(path, 4)]}, {"resume": path}):
        trainer = make_gan(of_one_graph, schedulers={"d": "linear"})
        trainer.fit(make_data(), epochs=3, clip_norm=0.5, **SETTINGS, **settings)
        outcomes.append(outcome_of(trainer))
    return outcomes


def test_an_optimizer_used_in_some_steps_shares_a_graph_and_resumes_bit_for_bit(tmp_path):
    (alone, again), *_ = everywhere(1, train_one_graph, tmp_path / "alone.ckpt")
    ranks = run_world(2, train_one_graph, tmp_path / "ranks.ckpt")
    assert_alike([whole for whole, _ in ranks], alone)
    assert all(one["fingerprint"] == other["fingerprint"] for one, other in [(alone, again), *ranks])


def resumed_gan(path: Path) -> list[dict[str, Any]]:
    """Returns the outcomes of a whole fit, and of one that resumed from its fourth step."""
    outcomes = []
    for settings in ({"callbacks": [SaveAt(path, 4)]}, {"resume": path}):
        trainer = make_gan(schedulers={"g": "cosine", "d": "linear"})
        trainer.fit(make_data(), epochs=2, **SETTINGS, **settings)
        outcomes.append(outcome_of(trainer))
    return outcomes


def clipped() -> dict[str, list[float]]:
    found = {}
    for name, limit in (("one", 0.01), ("each", {"g": 0.01})):
        history = make_gan().fit(make_data(), epochs=2, clip_norm=limit, **SETTINGS).history
        found |= {f"{name} {key}": numbers for key, numbers in history.items() if "grad_norm" in key}
    return found


@pytest.mark.parametrize("world_size", RANKS)
def test_the_history_has_the_norms_of_each_optimizers_gradients(world_size):
    with one_process():
        expected = clipped()
    assert [*expected] == ["one grad_norm_d", "one grad_norm_g", "each grad_norm_g"]
    assert all(norm > 0.01 for norms in expected.values() for norm in norms)
    for found in everywhere(world_size, clipped):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_callbacks_set_the_rates_of_several_optimizers():
    schedule = cx.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = cx.callbacks.ReduceLROnPlateau("d_loss", mode="min", factor=0.5, patience=1, min_delta=10.0)
    with one_process():
        for callback, expected in ((schedule, [0.0025, 0.0125]), (plateau, [0.005, 0.025])):
            trainer = make_gan()
            trainer.fit(make_data(), epochs=3, callbacks=[callback], **SETTINGS)
            assert outcome_of(trainer)["rates"] == pytest.approx(expected)
            with pytest.raises(cx.ConfigError, match="and Cosine both set the learning rate"):
                make_gan(schedulers={"d": "cosine"}).fit(make_data(), epochs=1, callbacks=[callback], **SETTINGS)


def test_an_optimizer_that_no_step_uses_is_warned_of_once():
    def step(trainer: cx.DistributedTrainer, batch: Any) -> None:
        trainer.optimize(trainer.model["d"](batch[0]).square().mean(), "d")

    with one_process(), pytest.warns(UserWarning, match="the parameters of 'g' do not change") as warned:
        make_gan(step).fit(make_data(), epochs=2, **SETTINGS)
    assert len([each for each in warned if "do not change" in str(each.message)]) == 1


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_of_two_optimizers_resumes_bit_for_bit(world_size, tmp_path):
    for whole, resumed in everywhere(world_size, resumed_gan, tmp_path / "middle.ckpt"):
        assert whole["fingerprint"] == resumed["fingerprint"]
        for name in ("metrics", "losses", "step", "rates"):
            assert whole[name] == resumed[name]


def test_a_checkpoint_names_its_optimizers(tmp_path):
    with one_process():
        trainer = make_gan()
        trainer.fit(make_data(), epochs=1, **SETTINGS)
        trainer.save_checkpoint(tmp_path / "two.ckpt")
        parts = make_parts()
        one = cx.DistributedTrainer(parts, None, adam(parts), train_step=gan_step)
        with pytest.raises(cx.CheckpointError, match="it has the optimizers g, d, and this trainer optimizer"):
            one.load_checkpoint(tmp_path / "two.ckpt")
        other = make_gan()
        other.load_checkpoint(tmp_path / "two.ckpt")
    momenta = [each["momentum_buffer"] for each in other.optimizers["d"].state.values()]
    assert len(momenta) == 4
    assert repr(other).startswith("DistributedTrainer(model=ModuleDict, loss=the model's own, g=Adam, d=SGD")


class Noting(cx.callbacks.Callback):
    """Notes the parameters of each part after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[float]]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([flat(self.trainer.model[name].parameters()).tolist() for name in ("g", "d")])


def spoiled_step(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Tensor]:
    """A step that has a loss of NaN for "g" where a row is marked, in step 2."""
    (real,) = batch
    of_d = trainer.optimize(trainer.model["d"](real).square().mean(), "d")
    is_bad = trainer.step == 1 and bool((real[:, 0] > 100).any())
    of_g = trainer.optimize(trainer.model["g"](real.clamp(max=1)).mean() * (torch.nan if is_bad else 1.0), "g")
    return {"d_loss": of_d, "g_loss": of_g}


def train_spoiled(on_nonfinite: str) -> tuple[list[Any], list[str], str]:
    data, noting = make_data(12), Noting()
    data[7, 0] = 1000.0  # of step 2, on the last of two ranks
    trainer, error = make_gan(spoiled_step), ""
    with warning_texts() as caught:
        try:
            trainer.fit(data, epochs=2, shuffle=False, on_nonfinite=on_nonfinite, callbacks=[noting], **SETTINGS)
        except cx.NonFiniteError as raised:
            error = str(raised)
    return noting.seen, caught, error


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_loss_of_nan_skips_the_update_of_its_optimizer_alone(world_size):
    ranks = everywhere(world_size, train_spoiled, "skip")
    for seen, _, error in ranks:
        (g_1, d_1), (g_2, d_2), (g_3, d_3), *_ = seen
        assert g_1 == g_2 != g_3
        assert len({str(d_1), str(d_2), str(d_3)}) == 3
        assert not error
        assert seen == ranks[0][0]
    bad = f"optimizer 'g': on rank {world_size - 1}, the loss is nan. The step is skipped."
    assert any("epoch 1, step 2 (2 in all), " + bad in text for text in ranks[0][1])


def test_a_loss_of_nan_ends_the_fit_on_every_rank_with_the_optimizers_name():
    for seen, _, error in run_world(2, train_spoiled, "raise"):
        assert len(seen) == 1
        assert "step 2 (2 in all), optimizer 'g': on rank 1, the loss is nan" in error
        assert "its parameters are as before" in error


def nan_gradient(trainer: cx.DistributedTrainer, batch: Any) -> None:
    """A step in which the loss is finite and the gradient of "g" is not, where a row is marked, in step 2."""
    (real,) = batch
    trainer.optimize(trainer.model["d"](real).square().mean(), "d")
    made = trainer.model["g"](real.clamp(max=1))
    if trainer.step == 1 and bool((real[:, 0] > 100).any()):
        made.register_hook(lambda gradient: gradient * torch.nan)
    trainer.log("seen", 1.0, reduce="sum")
    trainer.optimize(made.mean(), "g")


def spoiled_gradients(on_nonfinite: str) -> tuple[str, list[float]]:
    trainer, data, text = make_gan(nan_gradient), make_data(12), ""
    data[7, 0] = 1000.0  # of step 2, on the last of two ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = trainer.fit(data, epochs=1, shuffle=False, on_nonfinite=on_nonfinite, **SETTINGS)
            return "".join(str(each.message) for each in caught), history.history["seen"]
        except cx.NonFiniteError as raised:
            text = str(raised)
    return text, []


@pytest.mark.parametrize("world_size", [by_night(1), 2])
@pytest.mark.parametrize("on_nonfinite", [by_night("raise"), "skip"])
def test_a_gradient_of_nan_is_that_of_the_rank_that_made_it(world_size, on_nonfinite):
    found = everywhere(world_size, spoiled_gradients, on_nonfinite)
    text, seen = found[0]
    gradients = "gradients are not finite (g.0.weight, g.0.bias, g.2.weight, g.2.bias)"
    assert f"step 2 (2 in all), optimizer 'g': on rank {world_size - 1}, {gradients}. The " in text
    if on_nonfinite == "skip":
        assert all(numbers == [1.0 * world_size] for _, numbers in found), seen  # of step 1: step 2 is skipped


def unlike_step(trainer: cx.DistributedTrainer, batch: Any) -> Any:
    """A step that rank 1 takes in another way, in step 2; "g" and "d" are alike in size."""
    (rows,), kind = batch, trainer.metadata["kind"]
    names, differs = ["d", "g"], trainer.get_rank() == 1 and trainer.step == 1
    if differs and kind == "order":
        names.reverse()
    if differs and kind == "more":
        names.append("d")
    if differs and kind == "none":
        return trainer.model["d"](rows).mean()
    return [trainer.optimize(trainer.model[name](rows).square().mean(), name) for name in names][-1]


def unlike_calls(kind: str, outputs: int, **settings: Any) -> str:
    model = nn.ModuleDict({"g": make_model(outputs=3), "d": make_model(outputs=outputs)})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    trainer = cx.DistributedTrainer(model, optimizers=optimizers, train_step=unlike_step)
    trainer.metadata["kind"] = kind
    try:
        trainer.fit(make_rows(24)[0], epochs=1, verbose=False, **{"effective_batch_size": 8, **settings})
    except cx.CollectiveMismatchError as error:
        return str(error)
    return "nothing"


def on_tcp(kind: str, outputs: int) -> str:
    """As `unlike_calls`, in a world whose ranks share no memory: buckets of one size are not told apart by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cyxtrain.parallel.reducer._gradient_buffers", lambda layout, *_: [None] * len(layout))
        return unlike_calls(kind, outputs)


IN_STEP_2 = "rank 1 called self.optimize(optimizer='g') as call 1 of step 2, and rank 0 called self.optimize"


@pytest.mark.parametrize(
    ("function", "kind", "outputs", "expected"),
    [
        (unlike_calls, "order", 1, (IN_STEP_2, "rank 0 called self.optimize(optimizer='d') as call 1 of step 2")),
        by_night(unlike_calls, "none", 1, ("rank 1 was in all_reduce", "(optimizer='d') as call 1 of step 2")),
        by_night(on_tcp, "order", 3, (f"{IN_STEP_2}(optimizer='d') as call 1 of step 2",)),
        by_night(
            on_tcp, "more", 3, ("rank 1 called self.optimize(optimizer='d') as call 3 of step 2, and rank 0 called",)
        ),
    ],
)
def test_other_calls_of_optimize_on_one_rank_are_named(function, kind, outputs, expected):
    ranks = run_new_world(2, function, kind, outputs)
    for text in ranks:
        assert "train_step does not call self.optimize alike on all ranks: rank 1 " in text
        assert "decide by what they share" in text
    for words in expected:
        assert any(words in text for text in ranks), words


def final_scale() -> tuple[float, float]:
    """Returns the loss scale after 4 steps of two updates, and after 4 of which one overflowed."""
    scales = []
    for bad in (False, True):

        def step(trainer: cx.DistributedTrainer, batch: Any, bad: bool = bad) -> None:
            overflows = bad and trainer.step == 3
            trainer.optimize(trainer.model["d"](batch[0]).float().mean() * (1e30 if overflows else 1.0), "d")
            trainer.optimize(trainer.model["g"](batch[0]).mean(), "g")

        model = make_parts().float()
        optimizers = {name: torch.optim.SGD(part.parameters(), 0.01) for name, part in model.items()}
        trainer = cx.DistributedTrainer(model, optimizers=optimizers, train_step=step)
        amp = cx.AMPConfig(initial_scale=2.0**10, dynamic_history_size=2)
        trainer.fit(make_data(24).float(), epochs=1, precision="fp16", amp=amp, **SETTINGS)
        assert trainer._state.loss_scale is not None
        scales.append(trainer._state.loss_scale.value)
    return scales[0], scales[1]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_the_loss_scale_is_updated_once_per_step(world_size):
    for grown, fallen in everywhere(world_size, final_scale):
        assert grown == 2.0**12  # it doubles after two steps, not after two updates
        assert fallen == 2.0**10


def lbfgs_outcomes(path: Path) -> list[dict[str, Any]]:
    """Returns the outcomes of a whole fit by LBFGS, and of one that resumed from its second step."""
    outcomes = []
    X, y = make_rows(21)  # noqa: N806
    for settings in ({"callbacks": [SaveAt(path, 2)]}, {"resume": path}):
        model = make_model("float64")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer)
        trainer.fit(X, y, epochs=4, effective_batch_size=21, accumulation_steps=2, verbose=False, **settings)
        outcomes.append(outcome_of(trainer))
    return outcomes


@pytest.mark.parametrize("world_size", RANKS)
def test_lbfgs_trains_alike_on_any_number_of_ranks_and_resumes_bit_for_bit(world_size, tmp_path):
    (alone, again), *_ = everywhere(1, lbfgs_outcomes, tmp_path / "alone.ckpt")
    assert alone["losses"][-1] < alone["losses"][0] * 0.6
    assert again["fingerprint"] == alone["fingerprint"]
    ranks = run_world(world_size, lbfgs_outcomes, tmp_path / "ranks.ckpt")
    assert_alike([whole for whole, _ in ranks], alone)
    assert all(whole["fingerprint"] == resumed["fingerprint"] for whole, resumed in ranks)


def test_lbfgs_steps_as_by_hand():
    X, y = make_rows(21)  # noqa: N806
    model, by_hand = make_model("float64"), make_model("float64")
    with one_process():
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.LBFGS(model.parameters(), max_iter=5))
        trainer.fit(X, y, epochs=2, batch_size=21, shuffle=False, verbose=False)
    optimizer = torch.optim.LBFGS(by_hand.parameters(), max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(by_hand(X.double()), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(flat(model.parameters()), flat(by_hand.parameters()), rtol=1e-9)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_closure_computes_in_the_precision_of_the_fit(precision, dtype):
    model, found = make_model(), list[torch.dtype]()
    model.register_forward_hook(lambda _, inputs, output: found.append(output.dtype))
    trainer = cx.DistributedTrainer(
        model, "cross_entropy", torch.optim.LBFGS(model.parameters(), max_iter=2), train_step=closure_step
    )
    with one_process():
        trainer.fit(*make_rows(8), epochs=1, precision=precision, verbose=False)
    assert len(found) > 2
    assert {*found} == {dtype}


class Ascending(torch.optim.SGD):
    """Evaluates the loss again where it is higher, as SAM does, and steps by the gradient there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        first = float(closure())
        parameters = [each for group in self.param_groups for each in group["params"]]
        before = [each.clone() for each in parameters]
        for each in parameters:
            each.add_(each.grad, alpha=0.1)
        assert float(closure()) > first
        for each, value in zip(parameters, before, strict=True):
            each.copy_(value)
        super().step()


def closure_step(trainer: cx.DistributedTrainer, batch: Any) -> None:
    x, y = batch
    trainer.optimize(lambda: cross_entropy(trainer.model(x), y))


def train_ascending(*, own_step: bool) -> dict[str, Any]:
    X, y = make_rows(ROWS)  # noqa: N806
    model = make_model("float64")
    options = {"train_step": closure_step} if own_step else {}
    trainer = cx.DistributedTrainer(model, "cross_entropy", Ascending(model.parameters(), 0.1), **options)
    trainer.fit(X, y, epochs=2, **SETTINGS)
    return outcome_of(trainer)


def test_a_closure_sees_the_loss_over_all_ranks_also_where_a_rank_has_no_rows():
    by_fit, by_step = run_alone(lambda: [train_ascending(own_step=own) for own in (False, True)])
    np.testing.assert_allclose(by_step["parameters"], by_fit["parameters"], rtol=1e-12)
    ranks = run_world(2, train_both_ways)
    assert_alike([by_fit for by_fit, _ in ranks], by_fit)
    assert_alike([by_step for _, by_step in ranks], by_step)


def train_both_ways() -> list[dict[str, Any]]:
    return [train_ascending(own_step=own) for own in (False, True)]


def accumulated() -> list[dict[str, Any]]:
    """Returns the outcomes of one update per step, of one micro-batch and of three."""

    def step(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
        x, y = batch
        return trainer.optimize(cross_entropy(trainer.model(x), y))

    outcomes = []
    for parts in (1, 3):
        model = make_model("float64")
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model), train_step=step)
        trainer.fit(*make_rows(ROWS), epochs=2, accumulation_steps=parts, **SETTINGS)
        outcomes.append(outcome_of(trainer))
    return outcomes


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_one_update_per_step_accumulates_micro_batches(world_size):
    (whole, _), *_ = everywhere(1, accumulated)
    for outcomes in zip(*everywhere(world_size, accumulated), strict=True):
        assert_alike([*outcomes], whole)


def two_in_a_plain_fit() -> list[Any]:
    """Returns the outcomes of a fit with one optimizer of two groups, and with two optimizers."""
    outcomes = []
    for several in (False, True):
        model = make_model("float64")
        groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[2].parameters()], "lr": 0.01}]
        optimizers = {str(number): torch.optim.Adam([group]) for number, group in enumerate(groups)}
        options: dict[str, Any] = {"optimizers": optimizers} if several else {"optimizer": torch.optim.Adam(groups)}
        trainer = cx.DistributedTrainer(model, "cross_entropy", **options)
        trainer.fit(*make_rows(ROWS), epochs=2, clip_norm=0.1, **SETTINGS)
        outcomes.append(outcome_of(trainer))
    return outcomes


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_plain_fit_steps_all_of_its_optimizers(world_size):
    for one, two in everywhere(world_size, two_in_a_plain_fit):
        assert one["fingerprint"] == two["fingerprint"]
        assert (one["losses"], one["rates"], one["step"]) == (two["losses"], two["rates"], two["step"])
        assert one["metrics"]["learning_rate_1"] == two["metrics"]["learning_rate_1"] == [0.01, 0.01]


def steps_on_batches() -> list[Any]:
    """Returns the parameters after a fit of one epoch, and after as many calls of train_on_batch."""
    fitted, called = make_gan(), make_gan()
    fitted.fit(make_data(), epochs=1, shuffle=False, **SETTINGS)
    measured = [called.train_on_batch(rows, return_dict=True) for rows in make_data().split(6)]
    return [flat(each.model.parameters()) for each in (fitted, called)] + [sorted(measured[0]), called.step]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_train_on_batch_makes_the_updates_of_its_step(world_size):
    for fitted, called, names, step in everywhere(world_size, steps_on_batches):
        np.testing.assert_allclose(fitted, called, rtol=1e-12)
        assert {"loss", "d_loss", "g_loss"} <= {*names}
        assert step == 3


class StopOnRankOne(cx.callbacks.Callback):
    """Asks to end the fit, on one rank alone."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.get_rank() == 1 and self.trainer.step == 2:
            self.trainer.stop_training = True


def stopped_gan() -> int:
    trainer = make_gan()
    trainer.fit(make_data(), epochs=5, callbacks=[StopOnRankOne()], **SETTINGS)
    return trainer.step


def test_a_request_of_one_rank_reaches_the_others_with_an_update():
    assert run_world(2, stopped_gan) == [3, 3]


class StopEarly(cx.callbacks.Callback):
    """Asks to end the fit after its first step, on rank 1 alone."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.get_rank() == 1 and self.trainer.step == 1:
            self.trainer.stop_training = True


def in_turns(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    """A step that updates "d", "g", "d" ... in turns."""
    name = "dg"[trainer.step % 2]
    return trainer.optimize(trainer.model["d"](trainer.model["g"](batch[0])).mean(), name)


def stopped_in_a_frozen_step() -> int:
    trainer = make_gan(in_turns)
    trainer.model["g"].requires_grad_(False)
    trainer.fit(make_data(), epochs=5, callbacks=[StopEarly()], **SETTINGS)
    return trainer.step


def test_a_request_waits_where_a_step_averages_no_gradient():
    """Step 2 updates frozen parameters: nothing is sent, so no rank may act on its own request."""
    assert run_world(2, stopped_in_a_frozen_step) == [3, 3]


MARK = 1000.0


def is_marked(x: Tensor) -> bool:
    return bool((x[:, 0] == MARK).any())


def error_of(step: Callable[..., Any], marked: list[int], accumulation_steps: int = 1) -> str:
    """Returns the error of a fit of 8 rows per step, whose rows `marked` are so; "" if there is none."""
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), make_model()).double()
    trainer = cx.DistributedTrainer(model, None, adam(model), train_step=step)
    x, y = make_rows(24)
    x = x.double()
    x[marked, 0] = MARK
    try:
        settings: dict[str, Any] = {"shuffle": False, "effective_batch_size": 8, "verbose": False}
        trainer.fit(x, y, epochs=1, accumulation_steps=accumulation_steps, **settings)
    except cx.CyxtrainError as error:
        return str(error)
    return ""


def returned_or_optimized(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    """A step that returns its loss, NaN where a row is marked, and updates by itself in step 1."""
    x, y = batch
    loss = cross_entropy(trainer.model(x.clamp(max=1)), y)
    if trainer.step == 0:
        return trainer.optimize(loss)
    return loss * torch.nan if is_marked(x) else loss


def test_a_returned_loss_of_nan_is_that_of_its_rank_also_after_an_update():
    for error in run_world(2, error_of, returned_or_optimized, [13]):  # of step 2, on rank 1
        assert "step 2 (2 in all): on rank 1, the loss is nan" in error
        assert "on rank 0" not in error


def constant_where_marked(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    x, y = batch
    loss = cross_entropy(trainer.model(x.clamp(max=1)), y)
    return trainer.optimize(torch.zeros(()).double() if is_marked(x) else loss)


def test_buffers_are_shared_once_in_a_step_also_if_a_micro_batch_has_a_constant_loss():
    assert run_world(2, error_of, constant_where_marked, [9], 2) == ["", ""]


def constant_nan_where_marked(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    x, y = batch
    loss = cross_entropy(trainer.model(x.clamp(max=1)), y)
    return trainer.optimize(torch.tensor(torch.nan).double() if is_marked(x) else loss)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_an_update_with_a_constant_loss_of_nan_is_not_taken(world_size):
    for error in everywhere(world_size, error_of, constant_nan_where_marked, [13]):
        assert f"step 2 (2 in all), optimizer: on rank {world_size - 1}, the loss is nan" in error


def optimized_where_marked(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
    x, y = batch
    loss = cross_entropy(trainer.model(x.clamp(max=1)), y)
    return trainer.optimize(loss) if trainer.step == 0 or is_marked(x) else loss


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_an_update_in_a_micro_batch_and_not_in_the_last_one_is_refused(world_size):
    for error in everywhere(world_size, error_of, optimized_where_marked, [8, 9], 2):
        assert "called self.optimize in a micro-batch of step 2, and not in the last one" in error


def alone_on(trainer: cx.DistributedTrainer, name: str) -> None:
    trainer.optimize(trainer.model["d"](make_data()).mean(), name)


def refusals() -> dict[str, Callable[[], Any]]:
    def gan(step: Callable[..., Any], **settings: Any) -> Callable[[], Any]:
        return lambda: make_gan(step).fit(make_data(), epochs=1, **SETTINGS, **settings)

    def trainer(make: Callable[[nn.ModuleDict], Any], step: Any = gan_step, **options: Any) -> Callable[[], Any]:
        model = make_parts()
        return lambda: cx.DistributedTrainer(model, optimizers=make(model), train_step=step, **options).fit(
            make_data(), epochs=1, **SETTINGS
        )

    def lbfgs(**settings: Any) -> Callable[[], Any]:
        model = make_model()
        made = cx.DistributedTrainer(model, "cross_entropy", torch.optim.LBFGS(model.parameters()))
        return lambda: made.fit(*make_rows(8), epochs=1, verbose=False, **settings)

    return {
        "2.weight is in the optimizers 'g' and 'd'": trainer(
            lambda m: {"g": torch.optim.SGD(m.parameters(), 0.1), "d": torch.optim.SGD(m["d"][2].parameters(), 0.1)}
        ),
        "none of the optimizers 'g', 'd' has d.0.bias, d.2.weight, d.2.bias": trainer(
            lambda m: {"g": torch.optim.SGD(m["g"].parameters(), 0.1), "d": torch.optim.SGD([m["d"][0].weight], 0.1)}
        ),
        "optimizers must be a dictionary of torch.optim optimizers by name": trainer(lambda m: {"g": "adam"}),
        "optimizer and optimizers are given": lambda: cx.DistributedTrainer(
            make_parts(), None, "sgd", optimizers={"a": adam(make_parts())}
        ),
        "scheduler is for a single optimizer": lambda: make_gan(scheduler="cosine"),
        "has no optimizer for the schedule 'dd'. Did you mean 'd'?": lambda: make_gan(schedulers={"dd": "cosine"}),
        "has no optimizer 'dd'. Did you mean 'd'?": gan(gan_step, clip_norm={"dd": 1.0}),
        "the trainer has no optimizer 'x'": gan(lambda t, b: alone_on(t, "x")),
        "the train_step has several calls of optimize, which needs all samples": gan(gan_step, accumulation_steps=2),
        "does not depend on the parameters of the optimizer 'g' (Adam)": gan(lambda t, b: alone_on(t, "g")),
        "optimize needs the name of one of the optimizers: g, d": gan(lambda t, b: t.optimize(b[0].sum())),
        ", 4]: give a tensor with one number": gan(lambda t, b: t.optimize(t.model["g"](b[0]), "g")),
        "optimize is called within a train_step": lambda: make_gan().optimize(torch.zeros(())),
        "the trainer has the optimizers g, d": lambda: make_gan().optimizer,
        "LBFGS evaluates the loss several times per step, which clip_norm would change": lbfgs(clip_norm=1.0),
        "which precision='fp16' would change": lbfgs(precision="fp16"),
        "the optimizer 'd' evaluates the loss several times per step": trainer(
            lambda m: {"g": torch.optim.Adam(m["g"].parameters()), "d": torch.optim.LBFGS(m["d"].parameters())},
            step=lambda t, b: {"loss": t.model["g"](b[0]).square().mean() + t.model["d"](b[0]).square().mean()},
        ),
    }


def messages() -> list[str]:
    found = []
    for refused in refusals().values():
        try:
            refused()
            found.append("nothing")
        except cx.ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_what_cannot_work_is_refused_before_anything_starts(world_size):
    for found in everywhere(world_size, messages):
        for text, expected in zip(found, refusals(), strict=True):
            assert expected in text
