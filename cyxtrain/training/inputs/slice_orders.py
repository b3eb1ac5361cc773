"""A trial of two slices of a step, in both orders: with virtual ranks none may depend on those computed before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.rows import Rows, gather
from cyxtrain.data.batches.structure import OpaqueBatch, num_rows
from cyxtrain.data.rng import seed_generators
from cyxtrain.errors import shortened
from cyxtrain.optim.precision import threads_used
from cyxtrain.tensors.fingerprint import fingerprint, fingerprints
from cyxtrain.training.inputs.checked_data import CheckedData, TrainerArguments
from cyxtrain.training.inputs.dry_run import described_error, gradients_of
from cyxtrain.training.inputs.virtual_ranks import refuse_first
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.snapshot import BuffersKept, put_into_training, snapshot
from cyxtrain.training.trained import trained_with

_FAILED = (
    "virtual_ranks computes the slices of a step one after the other, and that failed on the first samples (a graph or "
    "a state that a model keeps from call to call is one cause)"
)
_REMEDY = (
    "something is kept from call to call, such as in an attribute that forward changes or in a generator of the "
    "model's own, or a kernel adds in any order. Begin anew in each forward; or keep it in a buffer (register_buffer), "
    "which each slice of a step finds alike"
)


def check_slice_orders(
    config: DistributedTrainingConfig, data: CheckedData, trainer: TrainerArguments, rows: Rows, epoch: int
) -> None:
    """Refuse what gives a slice of a step other bits if another one is computed before it on the same rank.

    Each slice begins with random numbers of its own and with the same buffers, as in a step. What is left to differ
    comes from what forward keeps elsewhere, or from kernels that add in any order. Parameters that forward writes to,
    such as an embedding's with max_norm, are refused too: each rank would change its own. No rank waits for another,
    and afterwards everything is as it was.

    Args:
        config: Settings with at least two `virtual_ranks`.
        data: The training data.
        trainer: The arguments of the trainer.
        rows: The first micro-batch.
        epoch: Where the fit is likely to begin, from 0.

    Raises:
        ConfigError: A tensor differs, or was written to; or a slice failed after another one.

    Cost: four forwards and backwards of a micro-batch; memory on the CPU for four times the gradients, and for what is
    trained.
    """
    assert config.virtual_ranks is not None
    refuse_first(config.virtual_ranks, _problems(config, data, trainer, rows, epoch))


def _problems(
    config: DistributedTrainingConfig, data: CheckedData, trainer: TrainerArguments, rows: Rows, epoch: int
) -> Iterator[str]:
    if num_rows(rows.inputs) < 2:  # batch norm may need two
        rows = data.source.first(2)
    slices = [rows, _other_rows(rows)]
    found, written = _computed(config, data, trainer, slices, (0, 1), epoch)
    if written:
        yield f"forward or backward writes to {shortened(written)}: {_REMEDY}"
    in_other_order, _ = _computed(config, data, trainer, slices, (1, 0), epoch)
    for number, tensors in found.items():
        for name, one in tensors.items():
            other = in_other_order[number].get(name)
            if other is not None and fingerprint(one) != fingerprint(other):
                amount = f"{float((one - other).abs().max()):.3g}"
                yield f"{name} differs by up to {amount} in a slice if another one is computed before it: {_REMEDY}"


def _other_rows(rows: Rows) -> Rows:
    """Return other rows of the same form: in reverse, and the last one in place of the first one."""
    if isinstance(rows.inputs, OpaqueBatch):  # its samples cannot be told apart
        return rows
    count = num_rows(rows.inputs)
    places = torch.arange(count - 1, -1, -1, device="cpu")
    places[-1] = count - 1
    return rows.mapped(lambda tensor: gather(tensor, places))


def _computed(
    config: DistributedTrainingConfig,
    data: CheckedData,
    trainer: TrainerArguments,
    slices: Sequence[Rows],
    order: Sequence[int],
    epoch: int,
) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
    """Return the loss and the gradients of each slice, by name, and which parameters were written to; change nothing.

    `order`: in which slices are computed.
    """
    device = data.placement.device
    trained = trained_with(trainer.model, data.loss)
    parameters = dict(plain_parameters(trained))
    owners = [trainer.model, *data.call.owners, *data.loss.functions]
    found: dict[int, dict[str, Tensor]] = {}
    with (
        memory_explained(trainer.world),
        described_error(trainer.world, _FAILED),
        threads_used(config.threads_of_fit),
        snapshot(owners, device, copies=True),
        trainer.logged.repeating(),
        torch.enable_grad(),
    ):
        put_into_training(trainer.model, *data.loss.modules)
        buffers = BuffersKept(trained)
        before = fingerprints([*parameters.values()])
        for number in order:
            buffers.restore()
            seed_generators(config.seed, epoch, 0, number, device)
            found[number] = _loss_and_gradients(data, trainer.model, parameters, slices[number])
        after = fingerprints([*parameters.values()])
    return found, [name for name, one, other in zip(parameters, before, after, strict=True) if one != other]


def _loss_and_gradients(
    data: CheckedData, model: nn.Module, parameters: Mapping[str, nn.Parameter], rows: Rows
) -> dict[str, Tensor]:
    """Return the loss of a copy of rows, which a model may change, and its gradients, on the CPU."""
    batch = Batch(0, *data.placement.place(rows.mapped(Tensor.clone)))
    value = data.loss(data.call(model, batch), batch).value
    found = {"the loss": value.detach().cpu()}
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    if value.requires_grad:
        gradients = gradients_of(value, [*trained.values()]) or []
        found |= {f"the gradient of {name}": each.cpu() for name, each in zip(trained, gradients, strict=False)}
    return found
