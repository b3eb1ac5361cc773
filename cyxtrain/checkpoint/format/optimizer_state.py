"""An optimizer's state by parameter name, so that it fits any order of parameters and any number of ranks.

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

# names in a group that are not hyperparameters
_PARAMETERS = ("params", "param_names")
# optimizers whose state is not shaped like the parameters
_OWN_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
# What the program decides. PyTorch adds "differentiable" to groups that come after a state was loaded (Adafactor).
_WAYS = ("fused", "differentiable")


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return an optimizer's state by parameter name, and its groups with names instead of parameters.

    The state is in the order of the model's parameters; its tensors are not copied and change with the next step.
    """
    saved = optimizer.state_dict()
    usual = {"state", "param_groups"}
    if set(saved) != usual:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {sorted(set(saved) - usual)} outside its state: it cannot be saved by "
            "name. Keep it in optimizer.state[parameter], or train without checkpoints and save the weights with "
            "cyxtrain.save_weights(model, path)."
        )
    name_groups = _group_names(optimizer, model)
    names = _names_by_index(saved["param_groups"], name_groups)
    state: dict[str, dict[str, Any]] = {}
    for index, values in saved["state"].items():
        if index not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state under {index!r}, which is no parameter: "
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
    current = optimizer.state_dict()
    matching = {frozenset(group["params"]): group for group in groups}
    new_groups = []
    for own, names in zip(current["param_groups"], name_groups, strict=True):
        saved = _hyper_parameters(matching[frozenset(names)])
        _require_same_kind(optimizer, own, saved)
        kept = {name: own[name] for name in (*_WAYS, "params") if name in own}
        new_groups.append({name: _like(value, own.get(name)) for name, value in saved.items()} | kept)
    indices = {name: index for index, name in _names_by_index(current["param_groups"], name_groups).items()}
    new_state = {indices[name]: dict(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": new_state, "param_groups": new_groups})
    _keep_types(optimizer, model, state)


def rebuild_groups(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: Sequence[Mapping[str, Any]], built: int
) -> list[str]:
    """Add the groups that the checkpoint's fit had added, and drop those that it had not added yet.

    Groups that the optimizer was built with stay; if these differ, nothing changes. Returns the names of the parameters
    in added groups.
    """
    own, saved = [frozenset(names) for names in _group_names(optimizer, model)], list(groups)
    left = Counter(frozenset(group["params"]) for group in saved)
    left.subtract(own[:built])
    parameters = dict(plain_parameters(model))
    added = [group for group in saved if left[frozenset(group["params"])] > 0]
    if min(left.values(), default=0) < 0 or not all(name in parameters for group in added for name in group["params"]):
        return []
    drop_groups(optimizer, built)
    for group in added:
        chosen = [parameters[name] for name in group["params"]]
        optimizer.add_param_group({**_hyper_parameters(group), "params": chosen})
    return [name for group in added for name in group["params"]]


def drop_groups(optimizer: torch.optim.Optimizer, first: int) -> None:
    """Remove the groups from number `first` on, with their state."""
    for group in optimizer.param_groups[first:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[first:]


def _keep_types(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore dtypes that PyTorch has changed to the parameter's: NAdam's mu_product is float32.

    Not if nothing had the parameter's dtype: then the model's dtype has changed.
    """
    for name, parameter in plain_parameters(model):
        saved = {key: value for key, value in state.get(name, {}).items() if isinstance(value, torch.Tensor)}
        if all(value.dtype != parameter.dtype for value in saved.values()):
            continue
        for key, value in saved.items():
            now = optimizer.state[parameter][key]
            if key != "step" and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


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
    indices = [index for group in groups for index in group["params"]]
    return dict(zip(indices, itertools.chain.from_iterable(name_groups), strict=True))


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in (*_PARAMETERS, *_WAYS)}


def _require_same_parameters(
    name_groups: Sequence[Sequence[str]], state: Mapping[str, object], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse other parameters, state of parameters in no group, and another grouping."""
    own = {name for names in name_groups for name in names}
    saved = {name for group in groups for name in group["params"]}
    differences = [
        f"only in the checkpoint: {sorted(saved - own)}" if saved - own else "",
        f"only in this optimizer: {sorted(own - saved)}" if own - saved else "",
        f"with state but in no group: {sorted(set(state) - saved)}" if set(state) - saved else "",
    ]
    if not any(differences):
        theirs = Counter(frozenset(group["params"]) for group in groups)
        ours = Counter(frozenset(names) for names in name_groups)
        odd = [sorted(names) for names in theirs - ours]
        differences.append(f"grouped differently; groups only in the checkpoint: {odd}" if theirs != ours else "")
    found = "; ".join(filter(None, differences))
    if found:
        raise CheckpointError(
            f"The optimizer's parameters are not those of the checkpoint: {found}. "
            "Build the model and the optimizer as they were when it was written."
        )


def _require_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse state that PyTorch's optimizers cannot have: the first step would fail, or be wrong."""
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, _OWN_SHAPES):
        return
    shapes = {name: parameter.shape for name, parameter in plain_parameters(model)}
    for name, values in state.items():
        for key, value in values.items():
            is_tensor = isinstance(value, torch.Tensor) and value.shape in (torch.Size(), shapes[name])
            if not is_tensor and not (key == "step" and isinstance(value, (int, float))):
                shown = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else brief(value)
                raise CheckpointError(
                    f"The checkpoint's optimizer has a '{brief(key)}' of '{name}' that is {shown}, and the parameter "
                    f"has the shape {list(shapes[name])}. Build the model and the optimizer as they were."
                )


def _require_same_kind(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the hyperparameters of another optimizer."""
    missing = sorted(set(_hyper_parameters(own)) - set(saved))
    if missing:
        raise CheckpointError(
            f"The checkpoint's optimizer has no {missing}, which {type(optimizer).__name__} needs: it was written with "
            "another optimizer, or another version of it. Build the optimizer as it was."
        )
    other = [name for name in _hyper_parameters(own) if name != "foreach" and not same_kinds(saved[name], own[name])]
    if other:
        raise CheckpointError(
            f"The checkpoint's optimizer has {other[0]}={brief(saved[other[0]])}, and {type(optimizer).__name__} has "
            f"{brief(own[other[0]])}: it was written with another optimizer. Build the optimizer as it was."
        )


def _like(value: Any, own: Any) -> Any:
    """Return a hyperparameter on the device of the present one (a learning rate may be a tensor)."""
    if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
        return value.to(own.device)
    return value
