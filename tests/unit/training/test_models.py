"""Models by name: found, made of a config or of settings, and refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.models import registry


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [
        ("mlp", {"inputs": 64, "outputs": 10}, 9610),
        ("mlp", {"inputs": 64, "outputs": 10, "hidden": [], "dropout": 0.5}, 650),
        ("cnn", {"image": [1, 8, 8], "outputs": 10}, 21386),
        ("vae", {"inputs": 64, "latent": 2, "hidden": 16}, 2244),
    ],
)
def test_models_of_the_package_are_made_of_settings(name, settings, parameters):
    config = cx.Config({"model": {"name": name, **settings}})
    rows = torch.rand(3, 64)
    for model in (cx.get_model(name)(config), cx.get_model(name)(config.model), cx.get_model(name)(**settings)):
        assert sum(each.numel() for each in model.parameters()) == parameters
        output = model(rows)
        assert name == "vae" or output.shape == (3, 10)
    assert name in cx.list_models()


def test_a_vae_gives_its_loss_and_what_it_has_made_of_the_rows():
    model = cx.get_model("vae")(inputs=64, latent=2)
    output = model(torch.rand(5, 8, 8))
    assert output["loss"].shape == ()
    assert (output["rows"].shape, output["mean"].shape) == ((5, 64), (5, 2))
    assert model.sample(4).shape == (4, 64)
    model.eval()
    rows = torch.rand(5, 64)
    assert torch.equal(model(rows)["rows"], model(rows)["rows"])  # nothing is drawn


def test_a_function_that_does_not_say_what_it_takes_is_tried():
    registry._MODELS["c"] = max
    with pytest.raises(cx.ConfigError, match="the model 'c' cannot be created with"):
        cx.get_model("c")(a=3)


def test_settings_rule_over_the_config():
    config = cx.Config({"model": {"name": "mlp", "inputs": 64, "outputs": 10}})
    assert cx.get_model("mlp")(config, outputs=3)(torch.rand(2, 64)).shape == (2, 3)


def test_a_class_a_function_and_one_that_takes_the_config_can_be_registered():
    @cx.register_model("net")
    class Net(nn.Linear):
        def __init__(self, width: int = 2):
            super().__init__(width, 1)

    @cx.register_model("function")
    def function(width: int):
        return nn.Linear(width, 1)

    @cx.register_model("whole")
    class Whole(nn.Linear):
        def __init__(self, config):
            super().__init__(config.model.width, config["training"]["epochs"])

    config = cx.Config({"model": {"width": 3}, "training": {"epochs": 4}})
    assert cx.get_model("net")(config).weight.shape == (1, 3)
    assert cx.get_model("function")(config).weight.shape == (1, 3)
    assert cx.get_model("whole")(config).weight.shape == (4, 3)
    assert {"net", "function", "whole"} <= set(cx.list_models())
    assert cx.list_models() == sorted(cx.list_models())


def test_a_cell_may_register_its_class_again_and_nobody_else_that_name():
    def made(answer):
        @cx.register_model("mine")
        class Mine(nn.Linear):
            def __init__(self):
                super().__init__(answer, 1)

    made(1)
    made(2)
    assert cx.get_model("mine")().weight.shape == (1, 2)
    with pytest.raises(cx.ConfigError, match=r"the model 'mlp' is already .*MLP.*: register"):
        cx.register_model("mlp")(nn.Linear)
    with pytest.raises(cx.ConfigError, match="register_model takes a name"):
        cx.register_model(nn.Linear)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cx.get_model("mpl"), r"no model 'mpl'. Did you mean 'mlp'\?"),
        (lambda: cx.get_model("transformer"), "no model 'transformer'. Known: cnn, mlp, vae"),
        (lambda: cx.get_model("mlp")(inputs=1, outputs=1, hiden=[2]), r"no setting 'hiden'. Did you mean 'hidden'\?"),
        (lambda: cx.get_model("mlp")(hidden=[2]), "the model 'mlp' needs inputs and outputs"),
        (lambda: cx.get_model("mlp")(inputs="a", outputs=1), "the model 'mlp' cannot be created with"),
        (lambda: cx.get_model("cnn")(image=[1, 8, 2], outputs=1), "images of 8 x 2 cannot be halved 2 times"),
        (lambda: cx.get_model("mlp")(3), "takes a Config or settings by name, got 3"),
        (lambda: cx.get_model("mlp")({"model": "mlp"}), "the section 'model' must have settings by name"),
        (lambda: cx.register_model("x")(lambda: 3) and cx.get_model("x")(), "must be a torch.nn.Module"),
    ],
)
def test_what_cannot_be_made_is_said(call, says):
    with pytest.raises(cx.ConfigError, match=says):
        call()
