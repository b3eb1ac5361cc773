"""Claims about weights files: any reader of safetensors can use them, and tied weights stay tied."""

import os

import pytest
import safetensors.torch
import torch

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import CheckpointState, write_checkpoint
from cyxtrain.checkpoint.weights import load_weights, save_weights
from cyxtrain.errors import CheckpointError


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def tied(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    return net


class WithExtraState(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra
        self.register_buffer("phase", torch.tensor([1 + 2j], dtype=torch.complex128))

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


def assert_equal(first, second):
    assert list(first.state_dict()) == list(second.state_dict())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_weights_come_back(tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    save_weights(model(), path)
    other = model(seed=1)
    load_weights(other, path)
    assert_equal(other, model())
    assert os.listdir(path.parent) == ["model.safetensors"]


def test_safetensors_itself_reads_the_file_into_a_plain_module(tmp_path):
    path = tmp_path / "model.safetensors"
    for build in (model, tied):
        save_weights(build(), path)
        other = build(seed=1)
        safetensors.torch.load_model(other, path)
        assert_equal(other, build())


def test_a_file_of_safetensors_itself_loads_also_with_the_other_of_two_tied_names(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(tied(), str(path))
    other = tied(seed=1)
    load_weights(other, path)
    assert_equal(other, tied())
    for kept in ("0.weight", "1.weight"):
        safetensors.torch.save_file({kept: tied()[0].weight.detach()}, path)
        other = tied(seed=1)
        load_weights(other, path)
        assert_equal(other, tied())


def test_tied_weights_are_stored_once_and_load_into_a_model_that_does_not_tie_them(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(tied(), path)
    assert list(safetensors.torch.load_file(path)) == ["0.weight"]
    untied = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    load_weights(untied, path)
    assert_equal(untied, tied())
    assert untied[0].weight is not untied[1].weight


def test_extra_state_and_rare_types_come_back(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(WithExtraState({"seen": (1, float("inf"))}), path)
    other = WithExtraState(None)
    other.phase.zero_()
    load_weights(other, path)
    assert other.extra == {"seen": (1, float("inf"))}
    assert other.phase.item() == 1 + 2j


def test_extra_state_that_the_file_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="_extra_state"):
        save_weights(WithExtraState(object()), tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == []


def test_all_differences_are_named_at_once_and_nothing_is_changed(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"0.weight": torch.zeros(3, 5), "0.bias": torch.zeros(3), "old": torch.zeros(1)}, path)
    net = model()
    with pytest.raises(CheckpointError) as caught:
        load_weights(net, path)
    message = str(caught.value)
    assert "missing ['1.bias', '1.num_batches_tracked'" in message
    assert "unexpected ['old']" in message
    assert "0.weight is [3, 5] there and [3, 4] in the model" in message
    assert_equal(net, model())


@pytest.mark.parametrize("function", [save_weights, load_weights])
def test_what_is_no_model_is_refused(tmp_path, function):
    with pytest.raises(cx.ConfigError, match=r"_weights takes a torch.nn.Module, got dict: pass the model itself"):
        function({}, tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8])
def test_what_is_no_weights_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_weights(model(), path)
    with pytest.raises(CheckpointError, match="There is no weights"):
        load_weights(model(), tmp_path / "absent")


def compiled_parts(seed):
    """A model of which a part was compiled, and then all of it."""
    net = model(seed)
    net[0] = torch.compile(net[0], backend="eager")
    return torch.compile(net, backend="eager")


def test_a_compiled_models_weights_are_the_models_own(tmp_path):
    first, plain, second = compiled_parts(1), model(0), compiled_parts(2)
    save_weights(first, tmp_path / "w.safetensors")
    assert set(safetensors.torch.load_file(tmp_path / "w.safetensors")) == set(plain.state_dict())
    load_weights(plain, tmp_path / "w.safetensors")
    load_weights(second, tmp_path / "w.safetensors")
    rows = torch.randn(4, 4)
    for net in (first, plain, second):
        net.eval()
    assert torch.equal(plain(rows), first(rows))
    assert torch.equal(second(rows), first(rows))
    save_weights(plain, tmp_path / "plain.safetensors")
    load_weights(second, tmp_path / "plain.safetensors")


def test_the_weights_of_a_checkpoint_load_and_every_byte_of_it_is_checked(tmp_path):
    first, second, path = model(1), model(2), tmp_path / "best.ckpt"
    write_checkpoint(path, CheckpointState(model=first.state_dict()))
    load_weights(second, path)
    assert_equal(first, second)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"best\.ckpt is corrupt"):
        load_weights(second, path)
