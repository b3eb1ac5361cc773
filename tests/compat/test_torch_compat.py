"""One file holds PyTorch's private names; without them there is a way round, or a refusal by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import SUPPORT, run_processes

import cyxtrain
from cyxtrain import CyxtrainError
from cyxtrain.environment import torch_compat
from cyxtrain.ring import RingProcessGroup

PACKAGE = Path(cyxtrain.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def test_names_are_where_the_list_says():
    """In the version that is here; the nightly tests look at the others."""
    here = parts(torch.__version__)
    expected = [e.name for e in torch_compat.PRIVATE_NAMES if parts(e.seen[0]) <= here <= parts(e.seen[1])]
    samples: dict[str, Any] = {
        "torch.nn.Module": nn.Linear(1, 1),
        "torch.optim.Optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
        "torch.utils.data.DataLoader": torch.utils.data.DataLoader([1]),
    }
    schedule = torch.optim.lr_scheduler.ConstantLR(samples["torch.optim.Optimizer"])
    samples["torch.optim.lr_scheduler.SequentialLR"] = torch.optim.lr_scheduler.SequentialLR(
        samples["torch.optim.Optimizer"], [schedule, schedule], [1]
    )
    samples["torch.optim.Optimizer.step"] = vars(samples["torch.optim.Optimizer"])["step"]
    samples["torch.optim.Optimizer"].step()
    missing = []
    for name in expected:
        path, _, attribute = name.partition(":")
        nothing = object()
        holder = samples[path] if attribute else None
        is_here = getattr(holder, attribute, nothing) is not nothing if attribute else _is_found(path)
        missing += [] if is_here else [name]
    assert missing == []


def _is_found(path: str) -> bool:
    holder, _, last = path.rpartition(".")
    return last in dir(torch_compat.find(holder))


@pytest.mark.nightly
@pytest.mark.timeout(240)  # it imports all of PyTorch's compiler
def test_a_fit_comes_to_the_same_bits_without_what_can_be_done_without():
    hidden = [e.name for e in torch_compat.PRIVATE_NAMES if "refused" not in e.without and ":" not in e.name]
    if torch_compat.BACKENDS_HAVE_A_CONSTRUCTOR:  # the old way is not for new versions
        hidden.remove("torch._C._distributed_c10d.Backend")
    script = SUPPORT / "torch_compat_ranks.py"
    whole, without = ([rank.stdout for rank in run_processes(2, script, *names, seconds=110)] for names in ([], hidden))
    assert whole == without
    assert whole[0] == whole[1]
    assert whole[0].split()[2:] == ["3.0", "3.0", "3.0"]


REFUSALS = {
    "torch.nn.utils.parametrize._inject_new_class": lambda: torch_compat.inject_parametrizations(nn.Linear(1, 1), []),
    "SimpleNamespace._compiled_call_impl": lambda: torch_compat.compiled_call(SimpleNamespace()),
    "SimpleNamespace._parameters": lambda: torch_compat.own_parameters(SimpleNamespace()),
    "SimpleNamespace._buffers": lambda: torch_compat.own_buffers(SimpleNamespace()),
    "SimpleNamespace._modules": lambda: torch_compat.own_modules(SimpleNamespace()),
    "SimpleNamespace._backward_hooks": lambda: torch_compat.hooks_of(SimpleNamespace()),
    "SimpleNamespace._register_backend": lambda: torch_compat.register_backend(SimpleNamespace(), None, ["cpu"]),
    "torch.autograd.Variable._execution_engine.queue_callback": torch_compat.require_end_of_backward,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_done_without_a_name_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(torch_compat, "find", lambda name: None)
    monkeypatch.setattr(torch_compat, "_queue_callback", None)
    with pytest.raises(CyxtrainError, match=f"has no {re.escape(name)}, which .* needs. Install one of 2.11 to 2.15"):
        REFUSALS[name]()


def test_without_a_counter_no_tensor_is_taken_for_unchanged():
    assert torch_compat.version_of(SimpleNamespace()) != torch_compat.version_of(SimpleNamespace())


@pytest.mark.parametrize("name", ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"])
def test_an_optimizer_without_the_list_of_hooks_counts_as_watched(name):
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), fused=True)
    assert not torch_compat.is_step_watched(optimizer, torch.optim.Adam.step)
    delattr(optimizer, name)
    assert torch_compat.is_step_watched(optimizer, torch.optim.Adam.step)


def test_the_backend_that_pytorch_finds_for_a_device_does_what_the_group_does():
    group = RingProcessGroup(dist.HashStore(), 0, 1)
    backend, tensor = group._get_backend(torch.device("cpu")), torch.ones(3)
    assert isinstance(backend, torch_compat.Backend) == torch_compat.BACKENDS_HAVE_A_CONSTRUCTOR
    for part in (group, backend):
        work = part.allreduce([tensor], dist.AllreduceOptions())
        assert work.wait()
        assert work.is_completed()
    if torch_compat.BACKENDS_HAVE_A_CONSTRUCTOR:
        assert [backend.supports_splitting, backend.supports_shrinking, backend.supports_coalescing] == [False] * 3
    group.shutdown()


def test_versions_are_said_alike_everywhere():
    first, *others = torch_compat.TESTED_VERSIONS
    assert f'"torch>={first}",' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = f"Tested with PyTorch {first}-{others[-1]};"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
    versions = ", ".join(f'"{version}"' for version in torch_compat.TESTED_VERSIONS)
    assert f"torch: [{versions}]" in (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
