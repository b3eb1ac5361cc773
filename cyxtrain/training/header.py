"""The lines that explain a fit before it starts, and how it computes, for comparison where it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.config import DDPConfig
from cyxtrain.data.batches.structure import named_tensors, parts_by_name
from cyxtrain.data.sources.source import Source
from cyxtrain.environment import schedulers
from cyxtrain.environment.process_env import ENVIRON
from cyxtrain.errors import counted, shortened
from cyxtrain.optim.optimizers import ONLY, spares_norms_and_biases
from cyxtrain.optim.precision import float32_products
from cyxtrain.parallel.compression import COMPRESSIBLE, as_matrix, columns_of
from cyxtrain.parallel.reducer import trained_parameters
from cyxtrain.progress.flops import in_words, peak_flops, tf32_speedup
from cyxtrain.ring import transport_of
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.compile import explain_compiled
from cyxtrain.training.state import TrainingState
from cyxtrain.world import runtime
from cyxtrain.world.consensus import backends_of
from cyxtrain.world.world import World

_BACKENDS = {
    "ring": "cpu (cyxtrain's ring, {transport})",
    "gloo": "gloo (PyTorch's, on CPUs)",
    "nccl": "nccl (NVIDIA's, on GPUs)",
}

_PRODUCTS = {
    "highest": "products of matrices and convolutions have all bits of float32",
    "high": "products of matrices and convolutions may use TF32, 10 bits of mantissa",
    "medium": "products of matrices and convolutions may use TF32 or bfloat16",
}
"""By `float32_precision`."""


def explain(state: TrainingState, plan: FitPlan, ddp_config: DDPConfig) -> list[tuple[str, str]]:
    """Return (what, how) of a fit, in the order in which they are shown."""
    model, position = state.model, state.position
    world = plan.world
    effective, loss = plan.feed.effective_batch_size, plan.data.loss
    first, last = position.epoch + 1, position.first_epoch + plan.epochs
    epochs = f"epoch {last}" if first == last else f"epochs {first} to {last}"
    epochs = epochs if plan.knows_epochs else f"from epoch {first}"
    left = "no epoch left" if plan.is_over(position) else epochs
    layout = "channels_last" if plan.config.channels_last else ""
    how = explain_compiled(plan.config.compile, plan.compiles_layers)
    facts = [
        ("cyxtrain", f"{library_versions()['cyxtrain']}, PyTorch {torch.__version__}"),
        ("world", _world(world, plan.config.num_processes)),
        ("backend", _backend(world, plan.data.placement.device) if world.size > 1 else "none needed"),
        *([("gradients", _compression(ddp_config, model, world.size))] if ddp_config.compression else []),
        ("batch", _batch(effective, world.size, plan.feed.rows_at_once)),
        ("steps", f"{_steps(plan)}, {left}" + (", a try" if plan.config.fast_dev_run else "")),
        ("data", plan.data.source.describe() + plan.data.source.explain(world) + _held_out(plan) + _converted(plan)),
        *_parts_of_batches(plan.data.source, plan.data.call.left_out),
        ("device", plan.devices),
        *_precision(model, plan),
        ("model", ", ".join(filter(None, (type(model).__name__, _parameters(model), layout, how)))),
        *_flops(plan),
        *([("mode", mode)] if (mode := _modes(model)) else []),
        *_optimizers(state, plan),
    ]
    besides = sum(each.numel() for each in {*state.trained.parameters()} - {*model.parameters()})
    if besides:
        facts.append(("loss", f"learns its own {counted(besides, 'parameter')}"))
    if loss.items is not None and loss.uses_num_items:
        facts.append(("loss", f"the model's, divided by the number of {loss.items.name} (num_items_in_batch)"))
    if loss.by_output and (others := parts_by_name(plan.data.source.targets).keys() - loss.by_output.keys()):
        facts.append(("left out", f"parts of y that loss_fn has no loss for: {shortened(sorted(others))}"))
    if loss.is_assumed_mean:
        whose, gives = ("the model's own", "the model") if loss.function is None else ("custom", "loss_fn")
        whose, gives = (whose, gives) if loss.used is None else ("train_step's", "it")
        facts.append(("loss", f"{whose} loss: assumed to be a mean over samples; {gives} may return (sum, weight)"))
    return facts


def _precision(model: nn.Module, plan: FitPlan) -> Iterator[tuple[str, str]]:
    """Yield precisions that are not PyTorch's defaults, and a hint if a GPU could be much faster."""
    config, device = plan.config, plan.data.placement.device
    if config.precision != "fp32":
        yield "precision", f"{config.precision}, by autocast"
    if config.float32_precision is not None:
        yield "precision", f"float32_precision={config.float32_precision!r}: {_PRODUCTS[config.float32_precision]}"
    uses_float32 = config.precision == "fp32" and any(each.dtype is torch.float32 for each in model.parameters())
    if device.type != "cuda" or config.float32_precision is not None or not uses_float32:
        return
    times = tf32_speedup(device)
    if times is not None:
        yield (
            "hint",
            f"float32_precision='high' lets matrix products use TF32: {times}as fast on this GPU, 10 bits of mantissa",
        )


def _flops(plan: FitPlan) -> Iterator[tuple[str, str]]:
    flops, device = plan.data.tried.flops_per_row, plan.data.placement.device
    if flops:
        peak = peak_flops(device, plan.dtype)
        known = "" if peak is None else f"; this GPU can {in_words(peak)}/s in {str(plan.dtype).removeprefix('torch.')}"
        yield "flops", f"{in_words(flops)} per sample, forward and backward{known}"


def _optimizers(state: TrainingState, plan: FitPlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    given, effective = config.batch_size * config.accumulation_steps, plan.feed.effective_batch_size
    scaling = f"{config.learning_rate_scaling}: given for {given:,} samples, and a step has {effective:,}"
    for name, rates in state.rates.items():
        own = "" if name == ONLY else f"{name}: "
        spares = spares_norms_and_biases(rates.optimizer, state.trained)
        words = [type(rates.optimizer).__name__]
        words += ["by PyTorch's fused kernel"] if name in plan.fused_optimizers else []
        words += ["no weight decay on norms and biases"] if spares else []
        yield "optimizer", own + ", ".join(words)
        if rates.differ_from_program:
            yield "rate", own + rates.explain(scaling)


def _world(world: World, num_processes: int | str | None) -> str:
    parts = [counted(world.size, "rank"), schedulers.started_by(ENVIRON, world.rank, world.size)]
    if num_processes not in (None, "auto", 1, world.size):
        parts.append(f"as launched: ignored num_processes={num_processes}")
    return ", ".join(filter(None, parts))


def _held_out(plan: FitPlan) -> str:
    sets = ", ".join(f"{each.source.describe()} {name}".rstrip() for name, each in plan.validation.items())
    return f", and {sets} for validation" if sets else ""


def _converted(plan: FitPlan) -> str:
    """Describe inputs that are converted to the parameters' type."""
    wanted = plan.data.placement.dtype
    inputs = named_tensors(plan.data.source.inputs, "X")
    others = {tensor.dtype for _, tensor in inputs if tensor.is_floating_point()} - {wanted}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in others)
    return f", {' and '.join(names)} becomes the model's {str(wanted).removeprefix('torch.')}" if names else ""


def _parts_of_batches(source: Source, not_taken: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what parts of a batch are taken for, if a user may have meant something else."""
    if not_taken:
        yield "left out", f"inputs that the model's forward does not take: {shortened(not_taken)}"
    if source.left_out:
        yield "left out", f"texts in each batch: {shortened(source.left_out)}"
    weights = source.example.weights
    if weights is not None and len(weights):
        first = "" if source.is_whole else " in the first batch"
        yield "weights", f"of samples (sample_weight, class_weight), from {weights.min():g} to {weights.max():g}{first}"


def _backend(world: World, device: torch.device) -> str:
    group = world.group_for(device)
    name = backends_of(group)[device.type]
    not_nccl = f"; not NCCL: {runtime.why_ring()}" if device.type == "cuda" and runtime.why_ring() else ""
    return _BACKENDS.get(name, name).format(transport=transport_of(group)) + not_nccl


def _compression(config: DDPConfig, model: nn.Module, world_size: int) -> str:
    asked = f"compression={config.compression!r} has nothing to do"
    if world_size == 1:
        return f"stay here: {asked} alone"
    trained = [parameter for _, parameter in trained_parameters(model)]
    dtypes = {parameter.dtype for parameter in trained}
    whole = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - COMPRESSIBLE)
    if not dtypes & COMPRESSIBLE:
        return f"sent as they are, {', '.join(whole)}: {asked}"
    others = f"; {', '.join(whole)} as they are" if whole else ""
    if config.compression == "powersgd":
        rank = config.matrix_approximation_rank
        if not any(columns_of(as_matrix(each), rank) for each in trained if each.dtype in COMPRESSIBLE):
            return f"sent as they are: no gradient is so large that matrices of rank {rank} would save a third"
        return f"sent as matrices of rank {rank}; what they leave out joins the next step{others}"
    return f"sent as {config.compression}{others}"


def _batch(effective_batch_size: int, world_size: int, rows_at_once: int) -> str:
    whole, rest = divmod(effective_batch_size, world_size)
    per_rank = f"{whole:,}" if rest == 0 else f"{whole:,} or {whole + 1:,}"
    parts = "" if rows_at_once >= whole + (rest > 0) else f" in micro-batches of {rows_at_once:,}"
    return f"{per_rank} per rank{parts}, {effective_batch_size:,} effective"


def _steps(plan: FitPlan) -> str:
    steps = plan.steps_per_epoch
    text = "as many as there are batches" if steps is None else f"{counted(steps, 'step')} per epoch"
    return text if plan.config.max_steps is None else f"{text}, at most {plan.config.max_steps:,}"


def _parameters(model: nn.Module) -> str:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    return f"{trained:,} parameters" + (f", and {frozen:,} frozen" if frozen else "")


def _modes(model: nn.Module) -> str:
    """Describe in which modes a model is trained; "": in training mode."""
    if not model.training:
        return "the model is in evaluation mode, as from_pretrained returns it, and is trained in training mode"
    parts = [name for name, part in model.named_modules() if not part.training]
    outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
    how = "model.train() before fit changes that"
    return f"training, but {shortened(outermost)} in evaluation mode, as given; {how}" if outermost else ""


def numerics_of(model: nn.Module, plan: FitPlan, ddp_config: DDPConfig) -> dict[str, Any]:
    """Return the numerics in use, as JSON values by their names in messages."""
    device, names = plan.data.placement.device, ", ".join(name for name in plan.fused_optimizers if name != ONLY)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    exchange = {
        "the size of buckets": ddp_config.bucket_size_mb,
        "the compression of gradients": ddp_config.compression or "none",
        "the rank of their approximation": ddp_config.matrix_approximation_rank,
    }
    return {
        "PyTorch": torch.__version__,
        "the parameters' dtypes": ", ".join(dtypes),
        "the precision": plan.config.precision,
        "the model": explain_compiled(plan.config.compile, plan.compiles_layers) or "run as it is",
        "the optimizer's kernel": f"fused {names}".rstrip() if plan.fused_optimizers else "as it was built",
        "the device": device.type,
        "the backend": dist.get_backend(plan.world.group),
        **({"the number of threads per rank": torch.get_num_threads()} if device.type == "cpu" else {}),
        "the precision of float32 products": _product_precision(device, plan.config.float32_precision),
        **(exchange if plan.world.size > 1 else {}),  # alone they do not
    }


def _product_precision(device: torch.device, requested: str | None) -> str:
    """Return the precision of float32 matrix products, whichever of PyTorch's two settings decides it."""
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with float32_products(requested):
        return str(backend.fp32_precision)
