"""The lines that explain a fit before it starts, and how it computes, for comparison where it resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import ONLY, spares_norms_and_biases
from cyxtrain.optim.precision import float32_products
from cyxtrain.parallel.compression import COMPRESSIBLE, as_matrix, columns_of
from cyxtrain.parallel.reducer import trained_parameters
from cyxtrain.progress.flops import in_words, peak_flops, tf32_speedup
from cyxtrain.ring import transport_of
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.compile import explain_compiled
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.training.step.hash_log import hashes_file
from cyxtrain.world import runtime
from cyxtrain.world.consensus import arithmetic_of_rank, backends_of
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
    model = state.model
    world = plan.world
    source = plan.data.source
    facts = [
        ("cyxtrain", f"{library_versions()['cyxtrain']}, PyTorch {torch.__version__}"),
        ("world", _world(world, plan.config.num_processes)),
        ("backend", _backend(world, plan.data.placement.device)),
    ]
    if ddp_config.compression:
        facts.append(("gradients", _compression(ddp_config, model, world.size)))
    facts += [
        ("batch", _batch(plan)),
        *_virtual_ranks(plan),
        *_hashes(plan, state),
        ("steps", _steps(plan, state.position)),
        ("data", source.describe() + source.explain(world) + _held_out(plan) + _converted(plan)),
        *_parts_of_batches(source, plan.data.call.left_out),
        ("device", plan.devices),
        *_precision(model, plan),
        ("model", _model(model, plan)),
        *_flops(plan),
        *_modes(model),
        *_optimizers(state, plan),
        *_losses(state, plan),
    ]
    return facts


def _losses(state: TrainingState, plan: FitPlan) -> Iterator[tuple[str, str]]:
    """Yield what is not obvious about the loss."""
    loss = plan.data.loss
    own_parameters = {*state.trained.parameters()} - {*state.model.parameters()}
    num_own = sum(each.numel() for each in own_parameters)
    if num_own:
        yield "loss", f"learns its own {counted(num_own, 'parameter')}"
    if loss.items is not None and loss.uses_num_items:
        yield "loss", f"the model's, divided by the number of {loss.items.name} (num_items_in_batch)"
    if loss.by_output:
        others = parts_by_name(plan.data.source.targets).keys() - loss.by_output.keys()
        if others:
            yield "left out", f"parts of y that loss_fn has no loss for: {shortened(sorted(others))}"
    if loss.is_assumed_mean:
        yield "loss", _assumed_mean(loss)


def _assumed_mean(loss: Loss) -> str:
    assumed = "loss: assumed to be a mean over samples"
    if loss.used is not None:
        return f"train_step's {assumed}; it may return (sum, weight)"
    if loss.function is None:
        return f"the model's own {assumed}; the model may return (sum, weight)"
    return f"custom {assumed}; loss_fn may return (sum, weight)"


def _precision(model: nn.Module, plan: FitPlan) -> Iterator[tuple[str, str]]:
    """Yield precisions that are not PyTorch's defaults, and a hint if a GPU could be much faster."""
    config = plan.config
    device = plan.data.placement.device
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
    flops = plan.data.tried.flops_per_row
    if not flops:
        return
    how = f"{in_words(flops)} per sample, forward and backward"
    peak = peak_flops(plan.data.placement.device, plan.dtype)
    if peak is not None:
        how += f"; this GPU can {in_words(peak)}/s in {_name_of(plan.dtype)}"
    yield "flops", how


def _optimizers(state: TrainingState, plan: FitPlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    given = config.batch_size * config.accumulation_steps
    effective = plan.feed.effective_batch_size
    scaling = f"{config.learning_rate_scaling}: given for {given:,} samples, and a step has {effective:,}"
    for name, rates in state.rates.items():
        own = "" if name == ONLY else f"{name}: "
        facts = [type(rates.optimizer).__name__]
        if name in plan.fused_optimizers:
            facts.append("by PyTorch's fused kernel")
        if spares_norms_and_biases(rates.optimizer, state.trained):
            facts.append("no weight decay on norms and biases")
        yield "optimizer", own + ", ".join(facts)
        if rates.differ_from_program:
            yield "rate", own + rates.explain(scaling)


def _world(world: World, num_processes: int | str | None) -> str:
    parts = [counted(world.size, "rank"), schedulers.started_by(ENVIRON, world.rank, world.size)]
    if num_processes not in (None, "auto", 1, world.size):
        parts.append(f"as launched: ignored num_processes={num_processes}")
    return ", ".join(filter(None, parts))


def _held_out(plan: FitPlan) -> str:
    if not plan.validation:
        return ""
    sets = [f"{each.source.describe()} {name}".rstrip() for name, each in plan.validation.items()]
    return f", and {', '.join(sets)} for validation"


def _converted(plan: FitPlan) -> str:
    """Describe inputs that are converted to the parameters' type."""
    wanted = plan.data.placement.dtype
    inputs = named_tensors(plan.data.source.inputs, "X")
    others = {tensor.dtype for _, tensor in inputs if tensor.is_floating_point()} - {wanted}
    if not others:
        return ""
    return f", {' and '.join(_names_of(others))} becomes the model's {_name_of(wanted)}"


def _parts_of_batches(source: Source, not_taken: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield how parts of a batch are used, if a user may have meant something else."""
    if not_taken:
        yield "left out", f"inputs that the model's forward does not take: {shortened(not_taken)}"
    if source.left_out:
        yield "left out", f"strings in each batch: {shortened(source.left_out)}"
    weights = source.example.weights
    if weights is not None and len(weights):
        first = "" if source.is_whole else " in the first batch"
        yield "weights", f"of samples (sample_weight, class_weight), from {weights.min():g} to {weights.max():g}{first}"


def _backend(world: World, device: torch.device) -> str:
    if world.size == 1:
        return "none needed"
    group = world.group_for(device)
    name = backends_of(group)[device.type]
    backend = _BACKENDS.get(name, name).format(transport=transport_of(group))
    if device.type == "cuda" and runtime.why_ring():
        return f"{backend}; not NCCL: {runtime.why_ring()}"
    return backend


def _compression(config: DDPConfig, model: nn.Module, world_size: int) -> str:
    if world_size == 1:
        return f"not sent: compression={config.compression!r} has no effect on a single rank"
    trained = [parameter for _, parameter in trained_parameters(model)]
    compressible = [each for each in trained if each.dtype in COMPRESSIBLE]
    whole = _names_of({parameter.dtype for parameter in trained} - COMPRESSIBLE)
    if not compressible:
        return f"sent as {', '.join(whole)}: compression={config.compression!r} has no effect on these types"
    how = f"sent as {config.compression}"
    if config.compression == "powersgd":
        rank = config.matrix_approximation_rank
        if not any(columns_of(as_matrix(each), rank) for each in compressible):
            return f"sent as they are: no gradient is so large that matrices of rank {rank} would save a third"
        how = f"sent as matrices of rank {rank}; what they leave out joins the next step"
    if whole:
        how += f"; {', '.join(whole)} as they are"
    return how


def _batch(plan: FitPlan) -> str:
    effective = plan.feed.effective_batch_size
    smallest, rest = divmod(effective, plan.slices.count)
    largest = smallest + (rest > 0)
    how = f"{smallest:,}"
    if largest > smallest:
        how += f" or {largest:,}"
    how += " per virtual rank" if plan.slices.is_virtual else " per rank"
    if plan.feed.rows_at_once < largest:
        how += f" in micro-batches of {plan.feed.rows_at_once:,}"
    return f"{how}, {effective:,} effective"


def _virtual_ranks(plan: FitPlan) -> Iterator[tuple[str, str]]:
    slices = plan.slices
    if not slices.is_virtual:
        return
    counts = sorted({slices.count // slices.num_ranks, -(-slices.count // slices.num_ranks)})
    of_each = " or ".join(f"{count:,}" for count in counts)
    how = f"{counted(slices.count, 'slice')} on {counted(slices.num_ranks, 'rank')}, {of_each} on each"
    if slices.count > slices.num_ranks:
        how += "; cyxtrain doctor -- COMMAND measures their cost"
    yield "slices", how
    yield "bits", f"the same on 1 to {slices.count:,} ranks; not with stops by time, or code that asks for the rank"


def _hashes(plan: FitPlan, state: TrainingState) -> Iterator[tuple[str, str]]:
    every = plan.config.log_hashes
    if every is not None:
        file = hashes_file(plan.config, state.run)
        yield "hashes", f"every {counted(every, 'step')} to {file}; cyxtrain bisect compares two runs"


def _steps(plan: FitPlan, position: Position) -> str:
    how = "as many as there are batches"
    if plan.length.steps_per_epoch is not None:
        how = f"{counted(plan.length.steps_per_epoch, 'step')} per epoch"
    if plan.config.max_steps is not None:
        how += f", at most {plan.config.max_steps:,}"
    how += f", {_epochs(plan, position)}"
    if plan.config.fast_dev_run:
        how += ", a try"
    return how


def _epochs(plan: FitPlan, position: Position) -> str:
    first = position.epoch + 1
    last = position.first_epoch + plan.length.epochs
    if plan.length.is_over(position):
        return "no epoch left"
    if not plan.length.knows_epochs:
        return f"from epoch {first}"
    if first == last:
        return f"epoch {last}"
    return f"epochs {first} to {last}"


def _model(model: nn.Module, plan: FitPlan) -> str:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    facts = [type(model).__name__, f"{trained:,} parameters"]
    if frozen:
        facts.append(f"and {frozen:,} frozen")
    if plan.config.channels_last:
        facts.append("channels_last")
    facts.append(explain_compiled(plan.config.compile, plan.compiles_layers))
    return ", ".join(filter(None, facts))


def _modes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield in which modes a model is trained, if not all of it is in training mode."""
    if not model.training:
        yield "mode", "the model is in evaluation mode, as from_pretrained returns it, and is trained in training mode"
        return
    parts = [name for name, part in model.named_modules() if not part.training]
    outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
    if outermost:
        how = "model.train() before fit changes that"
        yield "mode", f"training, but {shortened(outermost)} in evaluation mode, as given; {how}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names_of(dtypes: Collection[torch.dtype]) -> list[str]:
    return sorted(map(_name_of, dtypes))


def numerics_of(model: nn.Module, plan: FitPlan, ddp_config: DDPConfig) -> dict[str, Any]:
    """Return the numerics in use, as JSON values by their names in messages."""
    device = plan.data.placement.device
    kernel = "as it was built"
    if plan.fused_optimizers:
        names = ", ".join(name for name in plan.fused_optimizers if name != ONLY)
        kernel = f"fused {names}".rstrip()
    numerics: dict[str, Any] = {
        "PyTorch": torch.__version__,
        "the parameters' dtypes": ", ".join(_names_of({parameter.dtype for parameter in model.parameters()})),
        "the precision": plan.config.precision,
        "the model": explain_compiled(plan.config.compile, plan.compiles_layers) or "run as it is",
        "the optimizer's kernel": kernel,
        "the device": device.type,
        "the backend": dist.get_backend(plan.world.group),
    }
    if device.type == "cpu":
        numerics["the number of threads per rank"] = plan.config.threads_of_fit or torch.get_num_threads()
    numerics["the precision of float32 products"] = _product_precision(device, plan.config.float32_precision)
    if plan.slices.is_virtual:  # otherwise ranks may differ in it
        numerics |= arithmetic_of_rank(device)
    # A rank alone exchanges no gradients.
    if plan.world.size > 1:
        numerics["the size of buckets"] = ddp_config.bucket_size_mb
        numerics["the compression of gradients"] = ddp_config.compression or "none"
        numerics["the rank of their approximation"] = ddp_config.matrix_approximation_rank
    return numerics


def _product_precision(device: torch.device, requested: str | None) -> str:
    """Return the precision of float32 matrix products, whichever of PyTorch's two settings decides it."""
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with float32_products(requested):
        found = str(backend.fp32_precision)
    # Both are that of float32: "ieee" where it was set, if only to what it is anyway.
    return "none" if found == "ieee" else found
