"""An optimizer's state by parameter name: it fits any order of parameters and any number of ranks.

PyTorch numbers the parameters in the order in which the optimizer got them; a name is right also after layers were
reordered or grouped differently. PyTorch's `state_dict` and `load_state_dict` do the rest, with their hooks and casts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cyxtrain.checkpoint.format.encoding import same_kinds
from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.errors import CheckpointError, ConfigError, brief

# keys of a group that name its parameters
_PARAMETER_KEYS = ("params", "param_names")
# How a step is computed: the program decides. PyTorch adds "differentiable" to groups that are added after loading a
# state (Adafactor).
_IMPLEMENTATION_KEYS = ("fused", "differentiable")
# optimizers whose state is not shaped like the parameters
_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return an optimizer's state by parameter name, and its groups with names instead of parameters.

    The state is in the order of the model's parameters; its tensors are not copied and change with the next step.
    """
    saved = optimizer.state_dict()
    usual = {"state", "param_groups"}
    if set(saved) != usual:
        extra = sorted(set(saved) - usual)
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {extra} outside its state: it cannot be saved by name. Keep it in "
            "optimizer.state[parameter], or train without checkpoints and save the weights with "
            "cyxtrain.save_weights(model, path)."
        )
    name_groups = _group_names(optimizer, model)
    names = _names_by_index(saved["param_groups"], name_groups)
    state: dict[str, dict[str, Any]] = {}
    for index, values in saved["state"].items():
        if index not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state under {index!r}, which is not a parameter: "
                "it cannot be saved by name."
            )
        state[names[index]] = dict(values)
    ordered = {name: state[name] for name, _ in plain_parameters(model) if name in state}
    return ordered, _with_names(saved["param_groups"], name_groups)


def groups_by_name(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return an optimizer's groups with names instead of parameters, also if its state cannot be saved."""
    return _with_names(optimizer.param_groups, _group_names(optimizer, model))


def _with_names(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    return [{**_hyper_parameters(group), "params": [*own]} for group, own in zip(groups, names, strict=True)]


def load_optimizer_state_by_name(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Load the result of `optimizer_state_by_name` into an optimizer: all of it, or nothing.

    Tensors on the right device are taken over, not copied.
    """
    name_groups = _group_names(optimizer, model)
    _require_same_parameters(name_groups, state, groups)
    _require_state(optimizer, model, state)
    own_groups = optimizer.state_dict()["param_groups"]
    # By their parameters, because the groups may be in a different order.
    saved_groups = {frozenset(group["params"]): group for group in groups}
    new_groups = []
    for own, names in zip(own_groups, name_groups, strict=True):
        saved = _hyper_parameters(saved_groups[frozenset(names)])
        _require_same_kind(optimizer, own, saved)
        new_group = {key: _on_device_of(own.get(key), value) for key, value in saved.items()}
        for key in (*_IMPLEMENTATION_KEYS, "params"):
            if key in own:
                new_group[key] = own[key]
        new_groups.append(new_group)
    names_by_index = _names_by_index(own_groups, name_groups)
    indices = {name: index for index, name in names_by_index.items()}
    new_state = {indices[name]: dict(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": new_state, "param_groups": new_groups})
    _keep_types(optimizer, model, state)


def rebuild_groups(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: Sequence[Mapping[str, Any]], built: int
) -> list[str]:
    """Add the groups that the checkpoint's fit had added, and drop groups that it had not added yet.

    Groups that the optimizer was built with stay; if these differ, nothing changes. Returns the names of the parameters
    in added groups.
    """
    built_with = _group_names(optimizer, model)[:built]
    left = Counter(frozenset(group["params"]) for group in groups)
    left.subtract(frozenset(names) for names in built_with)
    if min(left.values(), default=0) < 0:  # the checkpoint lacks a group
        return []
    added = [group for group in groups if left[frozenset(group["params"])] > 0]
    names = _members(added)
    parameters = dict(plain_parameters(model))
    if not parameters.keys() >= set(names):
        return []
    drop_groups(optimizer, built)
    for group in added:
        chosen = [parameters[name] for name in group["params"]]
        optimizer.add_param_group({**_hyper_parameters(group), "params": chosen})
    return names


def drop_groups(optimizer: torch.optim.Optimizer, first: int) -> None:
    """Remove the groups from number `first` onwards, with their state."""
    for group in optimizer.param_groups[first:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[first:]


def _keep_types(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore dtypes that PyTorch has changed to the parameter's: NAdam's mu_product is float32.

    If no saved tensor has the parameter's dtype, the model's dtype has changed: PyTorch's choice stays.
    """
    for name, parameter in plain_parameters(model):
        saved = {key: value for key, value in state.get(name, {}).items() if isinstance(value, torch.Tensor)}
        if all(value.dtype != parameter.dtype for value in saved.values()):
            continue
        for key, value in saved.items():
            loaded = optimizer.state[parameter][key]
            if key != "step" and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _group_names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each group's parameters; refuse parameters that are not the model's."""
    names = {id(parameter): name for name, parameter in plain_parameters(model)}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"The optimizer's group {number} has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's. Build the optimizer from model.parameters() of the model that is trained."
                )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def _names_by_index(groups: Sequence[Mapping[str, Any]], name_groups: Sequence[Sequence[str]]) -> dict[int, str]:
    """Return the name of each of PyTorch's parameter numbers."""
    return dict(zip(_members(groups), itertools.chain.from_iterable(name_groups), strict=True))


def _members(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(group["params"] for group in groups))


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    others = (*_PARAMETER_KEYS, *_IMPLEMENTATION_KEYS)
    return {key: value for key, value in group.items() if key not in others}


def _require_same_parameters(
    name_groups: Sequence[Sequence[str]], state: Mapping[str, object], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse other parameters, state of parameters in no group, and another grouping."""
    own = set(itertools.chain.from_iterable(name_groups))
    saved = set(_members(groups))
    differences = []
    if saved - own:
        differences.append(f"only in the checkpoint: {sorted(saved - own)}")
    if own - saved:
        differences.append(f"only in this optimizer: {sorted(own - saved)}")
    if state.keys() - saved:
        differences.append(f"with state but in no group: {sorted(state.keys() - saved)}")
    own_groups = Counter(frozenset(names) for names in name_groups)
    saved_groups = Counter(frozenset(group["params"]) for group in groups)
    if not differences and saved_groups != own_groups:
        odd = [sorted(names) for names in saved_groups - own_groups]
        differences.append(f"grouped differently; groups only in the checkpoint: {odd}")
    if differences:
        raise CheckpointError(
            f"The optimizer's parameters differ from the checkpoint's: {'; '.join(differences)}. "
            "Build the model and the optimizer as they were when it was written."
        )


def _require_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse state that PyTorch's optimizers cannot have: the first step would fail, or be wrong."""
    is_pytorchs = type(optimizer).__module__.startswith("torch.optim.")
    if not is_pytorchs or isinstance(optimizer, _OTHER_SHAPES):
        return
    shapes = {name: parameter.shape for name, parameter in plain_parameters(model)}
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                is_valid = value.shape in (torch.Size(), shapes[name])
                shown = f"of shape {list(value.shape)}"
            else:
                is_valid = key == "step" and isinstance(value, (int, float))
                shown = brief(value)
            if not is_valid:
                raise CheckpointError(
                    f"The checkpoint's optimizer has a '{brief(key)}' of '{name}' that is {shown}, and the parameter "
                    f"has the shape {list(shapes[name])}. Build the model and the optimizer as they were."
                )


def _require_same_kind(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    expected = _hyper_parameters(own)
    missing = sorted(expected.keys() - saved.keys())
    if missing:
        raise CheckpointError(
            f"The checkpoint's optimizer has no {missing}, which {type(optimizer).__name__} needs: it was written with "
            "a different optimizer, or a different version of it. Build the optimizer as it was."
        )
    for name, value in expected.items():
        # `foreach` only chooses an implementation.
        if name != "foreach" and not same_kinds(saved[name], value):
            raise CheckpointError(
                f"The checkpoint's optimizer has {name}={brief(saved[name])}, and {type(optimizer).__name__} has "
                f"{brief(value)}: it was written with a different optimizer. Build the optimizer as it was."
            )


def _on_device_of(own: Any, value: Any) -> Any:
    """Return a saved hyperparameter on the device of the optimizer's (a learning rate may be a tensor)."""
    if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
        return value.to(own.device)
    return value
