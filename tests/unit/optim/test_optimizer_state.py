"""Claims about optimizer state by name: after a round trip the next steps have the same bits."""

import copy

import pytest
import torch
from checkpoints import pack_checkpoint
from markers import nightly_where

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, unpack_checkpoint
from cyxtrain.checkpoint.format.optimizer_state import load_optimizer_state_by_name, optimizer_state_by_name
from cyxtrain.checkpoint.weights import load_model_state
from cyxtrain.errors import CheckpointError, ConfigError

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused_adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "tensor_lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def bits(net):
    return {name: value.numpy().tobytes() for name, value in net.state_dict().items()}


def through_a_checkpoint(net, optimizer):
    state, groups = optimizer_state_by_name(optimizer, net)
    packed = pack_checkpoint(CheckpointState(model=net.state_dict(), optimizer=state, optimizer_groups=groups))
    return unpack_checkpoint(packed, "test")


def two_groups(net, reverse=False):
    decayed = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if not reverse:
        return groups
    return [{**group, "params": group["params"][::-1]} for group in groups[::-1]]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam])
def test_state_keeps_its_type_where_parameters_have_another(kind):
    net = model().double()
    optimizer = kind(net.parameters(), lr=0.01)
    feed = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def steps(net, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            net(feed).square().mean().backward()
            optimizer.step()

    steps(net, optimizer)
    saved, other = through_a_checkpoint(net, optimizer), model(1).double()
    again = kind(other.parameters(), lr=0.01)
    load_model_state(other, saved.model, "test")
    load_optimizer_state_by_name(again, other, saved.optimizer, saved.optimizer_groups)
    steps(net, optimizer)
    steps(other, again)
    assert bits(other) == bits(net)


class Own(torch.optim.Optimizer):
    """As people write them, without the options that PyTorch's own all have."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad


@pytest.mark.parametrize("kind", [Own, torch.optim.Adafactor])
def test_an_optimizer_with_few_options_is_loaded_again_and_again(kind):
    net = model()
    optimizer = kind(net.parameters())
    for seed in range(3):
        train(net, optimizer, 1, seed)
        saved = through_a_checkpoint(net, optimizer)
        load_optimizer_state_by_name(optimizer, net, saved.optimizer, saved.optimizer_groups)


@pytest.mark.parametrize("kind", [Own, torch.optim.Adafactor, torch.optim.AdamW])
@pytest.mark.parametrize("loads_before", [False, True])
def test_a_group_that_is_added_after_a_state_was_loaded_fits_one_that_was_added_before(kind, loads_before):
    """PyTorch gives it options that the optimizer was not built with."""

    def grown(loads):
        net = model()
        optimizer = kind(net[0].parameters())
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [*net[2].parameters(), *net[3].parameters()]})
        train(net, optimizer, 1, 0)
        return net, optimizer

    saved = through_a_checkpoint(*grown(loads_before))
    net, optimizer = grown(not loads_before)
    load_optimizer_state_by_name(optimizer, net, saved.optimizer, saved.optimizer_groups)
    assert len(optimizer_state_by_name(optimizer, net)[0]) == len(saved.optimizer)


@nightly_where(lambda name: name in ("adam", "tensor_lr", "adagrad", "nadam"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_bit_identical_in_any_order_of_parameters_and_groups(name):
    net = model()
    optimizer = OPTIMIZERS[name](two_groups(net))
    train(net, optimizer, 3, seed=1)
    saved = through_a_checkpoint(net, optimizer)

    other = model(seed=9)
    resumed = OPTIMIZERS[name](two_groups(other, reverse=True))
    train(other, resumed, 1, seed=5)  # its own state, which must not shine through
    load_model_state(other, saved.model, "checkpoint test")
    load_optimizer_state_by_name(resumed, other, saved.optimizer, saved.optimizer_groups)
    train(net, optimizer, 3, seed=2)
    train(other, resumed, 3, seed=2)
    assert bits(net) == bits(other)


def test_hyper_parameters_come_back_with_their_types():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25), betas=(0.8, 0.9))
    saved = through_a_checkpoint(net, optimizer)
    other = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1.0))
    load_optimizer_state_by_name(other, net, saved.optimizer, saved.optimizer_groups)
    (group,) = other.param_groups
    assert group["betas"] == (0.8, 0.9)
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == 0.25
    assert set(group) == set(optimizer.param_groups[0])


def test_step_keeps_its_type_and_place():
    net = model().to(torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.zero_grad()
    sum(parameter.float().sum() for parameter in net.parameters()).backward()
    optimizer.step()
    saved = through_a_checkpoint(net, optimizer)
    other = torch.optim.Adam(net.parameters())
    load_optimizer_state_by_name(other, net, saved.optimizer, saved.optimizer_groups)
    for parameter in net.parameters():
        assert other.state[parameter]["step"].dtype == torch.float32
        assert other.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_the_file_does_not_depend_on_the_order_of_parameters():
    net = model()
    forward = torch.optim.Adam(net.parameters())
    train(net, forward, 1, seed=1)
    backward = torch.optim.Adam(list(net.parameters())[::-1])
    load_optimizer_state_by_name(backward, net, *copy.deepcopy(optimizer_state_by_name(forward, net)))
    assert list(optimizer_state_by_name(backward, net)[0]) == [name for name, _ in net.named_parameters()]


def test_a_shared_parameter_has_its_first_name():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state, (group,) = optimizer_state_by_name(optimizer, net)
    assert list(state) == group["params"] == ["0.weight", "0.bias", "1.bias"]


def test_an_optimizer_built_from_named_parameters_works_with_one_that_is_not():
    net = model()
    named = torch.optim.Adam(net.named_parameters())
    train(net, named, 1, seed=1)
    state, groups = copy.deepcopy(optimizer_state_by_name(named, net))
    assert "param_names" not in groups[0]
    load_optimizer_state_by_name(torch.optim.Adam(net.parameters()), net, state, groups)
    again = torch.optim.Adam(net.named_parameters())
    load_optimizer_state_by_name(again, net, state, groups)
    assert again.param_groups[0]["param_names"] == named.param_groups[0]["param_names"]


def test_a_parameter_of_another_model_is_refused():
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 5).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"group 0 has a parameter of shape \[5, 3\] that is not the model's"):
        optimizer_state_by_name(optimizer, model())


def adam_state():
    net = model()
    optimizer = torch.optim.Adam(two_groups(net))
    train(net, optimizer, 1, seed=1)
    return net, *optimizer_state_by_name(optimizer, net)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, groups: groups[0]["params"].pop(), r"only in this optimizer: \['3.weight'\]"),
        (lambda state, groups: groups[0]["params"].append("x"), r"only in the checkpoint: \['x'\]"),
        (lambda state, groups: state.update(x={}), r"with state but in no group: \['x'\]"),
        (lambda state, groups: groups[0]["params"].append(groups[1]["params"].pop()), "grouped differently"),
        (lambda state, groups: groups[1].pop("betas"), r"no \['betas'\], which Adam needs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    net, state, groups = adam_state()
    change(state, groups)
    optimizer = torch.optim.Adam(two_groups(net), lr=0.5)
    with pytest.raises(CheckpointError, match=message):
        load_optimizer_state_by_name(optimizer, net, state, groups)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_of_another_kind_of_optimizer_is_refused():
    net, state, groups = adam_state()
    with pytest.raises(CheckpointError, match="SGD needs"):
        load_optimizer_state_by_name(torch.optim.SGD(two_groups(net), lr=0.1), net, state, groups)


def test_state_that_belongs_to_no_parameter_is_refused():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["global"] = {"k": 1}
    with pytest.raises(CheckpointError, match="'global'"):
        optimizer_state_by_name(optimizer, net)
