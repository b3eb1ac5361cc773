"""A model's outputs, kept batch by batch, and gathered from all ranks in the order of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.structure import leaves, with_parts
from cyxtrain.data.sources.source import Source
from cyxtrain.environment.accelerator import HostCopy, is_accelerator
from cyxtrain.errors import ConfigError
from cyxtrain.training.outside_fit.saved_predictions import Shapes, finished, joined_rows, kind_of, longest_of
from cyxtrain.world.world import World


class Outputs:
    """The outputs of a model, batch by batch, on the CPU.

    Args:
        structure: The output of the dry run, which a rank without a batch has too; its tensors have no values.
        rows_second: Names of parts whose rows are in the second dimension; here they are in the first.
        owner: Who needs the outputs, for errors.

    Attributes:
        is_complete: Whether this rank has run all its batches.
        kinds: What all rows have in common: dtypes and numbers of dimensions, by part; empty before the first batch.
        numbers: Of the batches, in the data.
    """

    def __init__(self, structure: Any, rows_second: frozenset[str] = frozenset(), owner: str = "predict") -> None:
        self.structure = structure
        self.rows_second = rows_second
        self.owner = owner
        self.is_complete = True
        self.kinds: dict[str, str] = {}
        self.numbers: list[int] = []
        self._batches: list[dict[str, list[Tensor]]] = []
        self._latest: dict[str, tuple[Tensor | HostCopy, list[int] | None]] = {}

    @property
    def batches(self) -> list[dict[str, list[Tensor]]]:
        """The parts of all outputs so far, by name, in pieces: one, or one for each row of a packed sequence."""
        self._read_latest()
        return self._batches

    @property
    def shapes(self) -> dict[str, list[Shapes]]:
        """The shapes of the pieces of each batch, by part."""
        batches = self.batches
        return {name: [_shapes_of(batch[name]) for batch in batches] for name in self.kinds}

    def pieces(self, name: str) -> list[Tensor]:
        """Return the pieces of a part of all batches."""
        return [*chain.from_iterable(batch[name] for batch in self.batches)]

    def add(self, given: Any, batch: Batch) -> None:
        """Add a batch's output; from an accelerator it is read one batch later, while that computes the next."""
        output, lengths = _checked(given, batch.rows, self.rows_second, self.owner)
        kinds = _kinds(output)
        expected = self.kinds or _kinds(dict(leaves(self.structure)))
        if kinds.keys() != expected.keys() or (self.kinds and kinds != expected):
            raise ConfigError(f"{self.owner} needs rows of one kind; the model returned {expected}, then {kinds}.")
        self.kinds = kinds
        self.numbers.append(batch.number)
        # These copies are queued before the wait for the previous ones, so that the device does not run dry.
        latest = {name: (_host_copy(tensor), lengths.get(name)) for name, tensor in output.items()}
        self._read_latest()
        self._latest = latest

    def take(self) -> list[dict[str, list[Tensor]]]:
        """Return the outputs so far, and forget them."""
        found = self.batches
        self._batches = []
        self.numbers = []
        return found

    def _read_latest(self) -> None:
        """Keep the latest outputs in host memory that is not pinned."""
        latest = self._latest
        if not latest:
            return
        self._latest = {}
        pieces: dict[str, list[Tensor]] = {}
        for name, (copy, lengths) in latest.items():
            rows = copy if isinstance(copy, Tensor) else copy.read().clone()
            pieces[name] = [rows]
            if lengths is not None:
                pieces[name] = [row[:, :length] for row, length in zip(rows.split(1), lengths, strict=True)]
        self._batches.append(pieces)


def _shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    return [list(each.shape) for each in tensors]


def _host_copy(tensor: Tensor) -> Tensor | HostCopy:
    if is_accelerator(tensor.device):
        return HostCopy(tensor.contiguous())
    # A copy: a model may write each batch's output into the same buffer, and a view would keep more than the rows.
    return tensor.detach().clone()


def _checked(
    output: Any, rows: int, rows_second: frozenset[str], owner: str
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors of an output by name, and the lengths of rows that were packed sequences.

    Raises ConfigError unless each has a row per input row.
    """
    found = dict(leaves(output))
    lengths: dict[str, list[int]] = {}
    for key, part in found.items():
        if isinstance(part, PackedSequence):
            found[key], counts = pad_packed_sequence(part, batch_first=True)
            lengths[key] = counts.tolist()
        elif key in rows_second and isinstance(part, Tensor) and part.dim() > 1:
            found[key] = part.transpose(0, 1)
    check_parts(output, rows, owner)
    for name, part in found.items():
        if len(part) != rows:
            raise _shape_error(owner, rows, output, name, part)
    return found, lengths


def check_parts(output: Any, rows: int, owner: str = "predict") -> None:
    """Raise ConfigError unless an output for some rows consists of tensors that can have a row per input row."""
    parts = dict(leaves(output))
    if not parts:
        raise _shape_error(owner, rows, output, "output", output)
    for name, part in parts.items():
        has_rows = isinstance(part, PackedSequence) or (isinstance(part, Tensor) and part.dim() > 0)
        if not has_rows:
            raise _shape_error(owner, rows, output, name, part)


def _shape_error(owner: str, rows: int, output: Any, name: str, part: Any) -> ConfigError:
    """Return the error for a part of an output that does not have a row per sample."""
    what = type(part).__name__
    if isinstance(part, Tensor):
        what = f"a tensor of shape {list(part.shape)}"
    if part is not output:
        what += f" as {name}"
    return ConfigError(
        f"{owner} needs a model that returns a tensor with a row per sample, or several in a dictionary, a "
        f"dataclass, a tuple or a list; for {rows} samples it returned {what}.{_shape_remedy(rows, output, name, part)}"
    )


def _shape_remedy(rows: int, output: Any, name: str, part: Any) -> str:
    if isinstance(output, (tuple, list)) and len(output) == rows and not isinstance(output[0], Tensor):
        return " Let a predict_step pad the entries of such a list, one per sample, and return how long each was."
    if isinstance(part, Tensor) and part.dim() > 1 and part.shape[1] == rows:
        return (
            " Its rows are in the second dimension, as in the states of an LSTM: return it with the rows first "
            "(state.transpose(0, 1)), or return only what you need."
        )
    if part is output:
        return ""
    if "past_key_values" in name:
        return " Set model.config.use_cache = False: then Hugging Face's models leave it out."
    return " Return only what you need."


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    return {name: kind_of(part) for name, part in parts.items()}  # even if they are padded to different lengths


def gathered_rows(
    world: World, outputs: Outputs, source: Source, *, pad_value: float | None = None, only_first: bool = False
) -> Any:
    """Return the outputs of all ranks in the order of the data; None if any is not complete.

    `only_first`: return NumPy arrays on rank 0, and None on the others.
    """
    facts = {
        "kinds": outputs.kinds,
        "shapes": outputs.shapes,
        "numbers": outputs.numbers,
        "is_complete": outputs.is_complete,
    }
    ranks = world.gather_json(facts)
    if not all(each["is_complete"] for each in ranks):
        return None
    numbers: list[int] = [*chain.from_iterable(each["numbers"] for each in ranks)]
    parts = {}
    for name, kind in _common_kinds(ranks, outputs.owner).items():
        dtype = getattr(torch, kind.split()[0])
        shapes_by_rank: list[list[Shapes]] = [each["shapes"].get(name, []) for each in ranks]
        values = _gathered(world, outputs.pieces(name), shapes_by_rank, dtype, only_first=only_first)
        if values is None:
            continue
        batches = [*chain.from_iterable(shapes_by_rank)]
        # Ranks that have their own data, not shares of the same, follow each other.
        order = _places(numbers, batches) if source.is_shared else None
        shapes = [*chain.from_iterable(batches)]
        joined = joined_rows(values, shapes, order, pad_value, longest_of(shapes))
        if name in outputs.rows_second and isinstance(joined, Tensor):
            joined = joined.transpose(0, 1)
        parts[name] = finished(joined, as_array=source.is_numpy or only_first)
    return with_parts(outputs.structure, parts) if parts else None


def _common_kinds(ranks: Sequence[Mapping[str, Any]], owner: str) -> dict[str, str]:
    """Return the kinds of all ranks' outputs, or raise ConfigError; empty if no rank has a batch."""
    # A rank without a batch has not seen what the model returns.
    kinds = [each["kinds"] for each in ranks if each["kinds"]]
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"{owner} needs rows of one kind; outputs differ between ranks: {kinds}.")
    return kinds[0] if kinds else {}


def _gathered(
    world: World,
    own: Sequence[Tensor],
    shapes_by_rank: Sequence[Sequence[Shapes]],
    dtype: torch.dtype,
    *,
    only_first: bool,
) -> Tensor | None:
    """Return the values of all ranks' pieces as one vector, by rank; None if this rank only sends its own.

    `shapes_by_rank`: of the pieces of each batch of each rank.
    """
    counts = [sum(map(math.prod, chain.from_iterable(batches))) for batches in shapes_by_rank]
    flat = [piece.reshape(-1) for piece in own]
    # The others need no memory for the rows of all ranks.
    if only_first and not world.is_first:
        if counts[world.rank]:
            dist.send(torch.cat(flat), 0, group=world.cpu_group)
        return None
    values = torch.empty(sum(counts), dtype=dtype, device="cpu")
    by_rank = values.split(counts)
    if flat:
        torch.cat(flat, out=by_rank[world.rank])
    # Ranks have different numbers of values, and an all_gather takes equal ones.
    for rank, part in enumerate(by_rank):
        if len(part) and not only_first:
            world.broadcast(part, rank)
        elif len(part) and rank != world.rank:
            dist.recv(part, rank, group=world.cpu_group)
    return values


def _places(numbers: Sequence[int], batches: Sequence[Shapes]) -> Tensor | None:
    """Return where each row goes, by the batches' numbers and shapes; None: all are in order."""
    as_gathered = range(len(numbers))
    in_order = sorted(as_gathered, key=numbers.__getitem__)
    if in_order == [*as_gathered]:
        return None
    places: dict[int, Tensor] = {}
    first = 0
    for each in in_order:
        end = first + sum(shape[0] for shape in batches[each])
        places[each] = torch.arange(first, end, device="cpu")
        first = end
    return torch.cat([places[each] for each in as_gathered])
