"""The ring's operations as PyTorch calls them: arguments are checked, and converted for `Group`.

PyTorch 2.11 and 2.13 name some methods differently; both names are defined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, CyxtrainError, error_from_facts
from cyxtrain.ring import sparse
from cyxtrain.ring.gradient_buffer import SharedGradientBuffer, make_gradient_buffers
from cyxtrain.ring.group import Group
from cyxtrain.ring.messages import ANY_SOURCE
from cyxtrain.ring.schedules.algorithms import neighbouring
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.schedules.summation import RowSum, Span
from cyxtrain.ring.wire.payload import addresses_of, check_target, copy_back, flat_view_of, replace, write
from cyxtrain.ring.work import MessageWork, collective, timeout_of

_TENSORS = {Tensor}
_One = TypeVar("_One")
_Other = TypeVar("_Other")
_REDUCTIONS = {getattr(dist.ReduceOp, each.name): each for each in Reduction if each}


class RingOperations:
    """The operations of a process group under PyTorch's names; `backend` makes groups of them.

    A collective runs in the calling thread. With `async_op=True` it runs in the group's own thread if cores are free or
    the network is slow (CYXTRAIN_COMMUNICATION); otherwise the returned work is done already.
    """

    _group: Group

    # Collectives.

    @collective("all_reduce", short=("op", "timeout"))
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place, on all ranks."""
        given = as_list(tensors, "all_reduce")
        reduction = reduction_of(opts)
        timeout = timeout_of(opts)
        # The usual case, before the checks that take longer.
        if len(given) == 1 and given[0].layout is torch.strided:
            self._group.all_reduce(given[0], reduction, timeout)
            return given
        for tensor in separated(given):
            if tensor.layout is torch.sparse_coo:
                sparse.all_reduce(self._group, tensor, reduction, timeout)
            else:
                self._group.all_reduce(tensor, reduction, timeout)
        return given

    @collective("reduce", short=("root", "op", "timeout"))
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place on one rank; other ranks' tensors do not change."""
        given = as_list(tensors, "reduce")
        for tensor in separated(given):
            self._group.reduce(tensor, reduction_of(opts), opts.rootRank, timeout_of(opts))
        return given

    @collective("broadcast", short=("root", "timeout"))
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the tensor of one rank to all."""
        given = as_list(tensors, "broadcast")
        for tensor in given:
            self._group.broadcast(tensor, opts.rootRank, timeout_of(opts))
        return given

    @collective("all_gather", num_tensors=2)
    def allgather(self, output_lists: Any, inputs: Any, opts: Any) -> Any:
        """Copy the tensor of every rank to all, into lists; the work's result has a row per rank, as NCCL's."""
        lists = as_lists(output_lists, "all_gather")
        tensors = as_list(inputs, "all_gather")
        result = []
        for outputs, tensor in pairs(lists, tensors, "all_gather"):
            check_targets(outputs, tensor, self.size(), "all_gather")
            gathered = torch.empty(self.size() * tensor.numel(), dtype=tensor.dtype, device="cpu")
            self._group.all_gather(gathered, tensor, timeout_of(opts))
            unpack(gathered, outputs)
            result.append(gathered.view(self.size(), *tensor.shape))
        return result

    @collective("all_gather", num_tensors=2)
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Copy the tensor of every rank to all, into one tensor."""
        self._gather_into(output, tensor, opts)
        return [output]

    @collective("reduce_scatter", num_tensors=2, short=("op", "timeout"))
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Reduce a list of tensors, and leave each rank its own; they may differ in size."""
        given = as_list(outputs, "reduce_scatter")
        lists = as_lists(input_lists, "reduce_scatter")
        for output, tensors in pairs(given, lists, "reduce_scatter"):
            check_length(tensors, self.size(), "reduce_scatter")
            check_dtypes([output, *tensors], "reduce_scatter")
            check_count(tensors[self.rank()], output.numel(), output.dtype, "reduce_scatter")
            sizes = [tensor.numel() for tensor in tensors]
            self._group.reduce_scatter(output, joined(tensors), reduction_of(opts), timeout_of(opts), sizes)
        return given

    @collective("reduce_scatter", num_tensors=2, short=("op", "timeout"))
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor, and leave each rank its own part."""
        self._scatter_reduced(output, tensor, opts)
        return [output]

    @collective("gather", num_tensors=2, short=("root", "timeout"))
    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> Any:
        """Copy the tensor of every rank to one, into a list of tensors."""
        (tensor,) = as_list(inputs, "gather", count=1)
        outputs: list[Tensor] = []
        count = 0
        if self.rank() == opts.rootRank:
            outputs = as_lists(output_lists, "gather")[0]
            check_targets(outputs, tensor, self.size(), "gather")
            count = self.size() * tensor.numel()
        gathered = torch.empty(count, dtype=tensor.dtype, device="cpu")
        self._group.gather(gathered, tensor, opts.rootRank, timeout_of(opts))
        unpack(gathered, outputs)
        return outputs

    @collective("scatter", num_tensors=2, short=("root", "timeout"))
    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Copy to each rank its tensor of a list on one rank."""
        (output,) = as_list(outputs, "scatter", count=1)
        flat = torch.empty(0, dtype=output.dtype, device="cpu")
        if self.rank() == opts.rootRank:
            tensors = as_lists(input_lists, "scatter")[0]
            check_shapes(tensors, output, self.size(), "scatter")
            flat = joined(tensors)
        self._group.scatter(output, flat, opts.rootRank, timeout_of(opts))
        return [output]

    @collective("all_to_all", num_tensors=4)
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *,
        opts: Any,
    ) -> Any:
        """Send a part of a tensor to each rank, and receive one from each; sizes of parts count rows."""
        check_dtypes([output, tensor], "all_to_all")
        send = split_spans(tensor, input_splits, self.size())
        receive = split_spans(output, output_splits, self.size())
        target = flat_view_of(check_target(output))
        self._group.all_to_all(target, receive, flat_view_of(tensor), send, timeout_of(opts))
        copy_back(target, output)
        return [output]

    @collective("all_to_all", num_tensors=2)
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """Send a tensor to each rank, and receive one from each."""
        check_dtypes([*outputs, *inputs], "all_to_all")
        check_length(outputs, self.size(), "all_to_all")
        check_length(inputs, self.size(), "all_to_all")
        for output in outputs:
            check_target(output)
        target = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=outputs[0].dtype, device="cpu")
        send = neighbouring([tensor.numel() for tensor in inputs])
        receive = neighbouring([tensor.numel() for tensor in outputs])
        self._group.all_to_all(target, receive, joined(inputs), send, timeout_of(opts))
        for output, span in zip(outputs, receive, strict=True):
            write(target[slice(*span)], output)
        return outputs

    @collective("barrier", num_tensors=0)
    def barrier(self, opts: Any) -> Any:
        """Return when all ranks have called it."""
        self._group.barrier(timeout_of(opts))
        return []

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; name a missing one otherwise, in Gloo's words too."""
        at_once = timeout == timedelta(0)
        if at_once:
            timeout = timedelta(microseconds=1)
        try:
            self._group.barrier(timeout)
        except CyxtrainError as error:
            message = f"{self._in_gloos_words(error, at_once=at_once)}: {error}"
            raise error_from_facts(error.to_facts() | {"message": message}) from None

    def _in_gloos_words(self, error: CyxtrainError, *, at_once: bool) -> str:
        if self.rank() > 0:
            return (
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0"
            )
        if at_once:
            return "Rank 0 timed out in monitoredBarrier"
        return f"Rank {error.rank} failed to pass monitoredBarrier"

    def make_gradient_buffers(
        self, kinds: Sequence[tuple[int, torch.dtype]], row_sum: RowSum | None = None
    ) -> list[SharedGradientBuffer | None]:
        """Return zeroed buffers in shared memory, or None for each that cannot be; all ranks call it."""
        return make_gradient_buffers(self._group, kinds, row_sum)

    # Several tensors at once.

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor in place, on all ranks."""
        return self.allreduce(tensors, opts)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Do `allgather` of each tensor; PyTorch gives one list of outputs per rank."""
        for outputs in output_lists:
            check_length(outputs, len(inputs), "all_gather", "input")
        lists_by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(lists_by_tensor, inputs, opts)

    @collective("all_gather", num_tensors=2)
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """Do `all_gather_single` of each tensor."""
        for output, tensor in pairs(outputs, snapshot(inputs, outputs), "all_gather"):
            self._gather_into(output, tensor, opts)
        return outputs

    @collective("reduce_scatter", num_tensors=2, short=("op", "timeout"))
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """Do `reduce_scatter_single` of each tensor."""
        for output, tensor in pairs(outputs, snapshot(inputs, outputs), "reduce_scatter"):
            self._scatter_reduced(output, tensor, opts)
        return outputs

    def _gather_into(self, output: Tensor, tensor: Tensor, opts: Any) -> None:
        check_count(output, self.size() * tensor.numel(), tensor.dtype, "all_gather")
        flat = flat_view_of(check_target(output))
        self._group.all_gather(flat, tensor, timeout_of(opts))
        copy_back(flat, output)

    def _scatter_reduced(self, output: Tensor, tensor: Tensor, opts: Any) -> None:
        check_count(tensor, self.size() * output.numel(), output.dtype, "reduce_scatter")
        self._group.reduce_scatter(output, flat_view_of(tensor), reduction_of(opts), timeout_of(opts))

    # PyTorch 2.11's names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MessageWork:
        """Begin to send to one rank."""
        return self._message("send", tensors, dst, tag, receiving=False)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MessageWork:
        """Begin to receive from one rank."""
        return self._message("recv", tensors, src, tag, receiving=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        """Begin to receive from the rank that sends first."""
        return self._message("recvAnySource", tensors, ANY_SOURCE, tag, receiving=True)

    def _message(self, name: str, tensors: list[Tensor], peer: int, tag: int, *, receiving: bool) -> MessageWork:
        (tensor,) = as_list(tensors, name, count=1)
        end_profiled = None
        if torch_compat.is_profiling():
            end_profiled = torch_compat.begin_profiled(f"ring:{name}", [tensor])
        if receiving:
            check_target(tensor)
        flat = flat_view_of(tensor)
        mailbox, message = self._group.message(flat, peer, tag, receiving=receiving)

        # It also keeps the flat tensor alive, whose memory the message uses.
        def finish() -> None:
            if receiving:
                copy_back(flat, tensor)
            if end_profiled is not None:
                end_profiled()

        return MessageWork(mailbox, message, tensor, finish, self._group.engine.timeout.total_seconds())

    # The end.

    def shutdown(self) -> None:
        """Leave the group with a goodbye. Idempotent."""
        self._group.engine.leave()

    def fail(self, reason: str | CyxtrainError) -> None:
        """End the group because of an error of this rank, an exception or a message, and tell all ranks."""
        self._group.engine.fail(reason)

    def abort(self) -> None:
        """End everything that waits in this group, on every rank."""
        self.fail("its group was aborted")

    # What PyTorch needs of a group written in Python.

    def rank(self) -> int:
        """Return this rank."""
        return self._group.rank

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._group.world_size

    getRank, getSize = rank, size  # noqa: N815 - PyTorch's names

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return "ring"."""
        return "ring"

    name = _get_backend_name = getBackendName

    @property
    def supports_coalescing(self) -> bool:
        """Whether PyTorch should bundle calls: it need not."""
        return False

    @property
    def transport(self) -> str:
        """How collectives reach other ranks: "unix", "tcp" or a mixture; "none" with one rank."""
        return self._group.engine.transport

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later collectives."""
        self._group.engine.timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: a group numbers its collectives itself."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this group has begun."""
        return self._group.engine.sequence


def reduction_of(opts: Any) -> Reduction:
    """Return a call's reduction, SUM by default; refuse those that the ring does not have."""
    op: Any = dist.ReduceOp.SUM
    if opts is not None:
        op = getattr(opts, "reduceOp", opts)
    # A ReduceOp has an `op`, its RedOpType; callers may also pass the RedOpType itself.
    kind = getattr(op, "op", op)
    try:
        return _REDUCTIONS[kind]
    except (KeyError, TypeError):
        if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            raise ConfigError(
                f"a reduction is one of torch.distributed.ReduceOp, as ReduceOp.SUM, not {op!r}."
            ) from None
        known = ", ".join(reduction.name for reduction in _REDUCTIONS.values())
        raise ConfigError(f"the ring has no reduction {kind}; it has {known}.") from None


def as_list(tensors: Any, name: str, count: int | None = None) -> list[Tensor]:
    """Return a list of tensors, also for a single one; refuse anything else or, if given, another `count`."""
    if isinstance(tensors, Tensor):
        return [tensors]
    # The usual case, before the checks that take longer.
    if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return tensors
    given: list[Tensor] = tensors
    if type(tensors) is not list or set(map(type, tensors)) != _TENSORS:
        _check_tensors(tensors, name)
        given = list(tensors)
    if not given or count not in (None, len(given)):
        raise ConfigError(f"{name}: needs {count or 'at least one'} tensor, got {len(given)}.")
    return given


def _check_tensors(tensors: Any, name: str) -> None:
    """Refuse an argument that is not a sequence of tensors."""
    if not isinstance(tensors, Sequence) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ConfigError(f"{name}: needs a tensor, or a list of tensors, got {_type_name(tensors)}.")


def as_lists(lists: Any, name: str) -> list[list[Tensor]]:
    """Return a list of lists of tensors, also for a single list."""
    if not isinstance(lists, Sequence) or not lists:
        raise ConfigError(f"{name}: needs a list of tensors, got {_type_name(lists)}.")
    if isinstance(lists[0], Tensor):
        return [as_list(lists, name)]
    return [as_list(tensors, name) for tensors in lists]


def _type_name(given: Any) -> str:
    """Name the type of an argument and of its items."""
    if not isinstance(given, (list, tuple)):
        return type(given).__name__
    items = sorted({_type_name(item) for item in given})
    return f"a {type(given).__name__} of {' and '.join(items) or 'nothing'}"


def pairs(one: Sequence[_One], other: Sequence[_Other], name: str) -> list[tuple[_One, _Other]]:
    """Return the items at the same place in two lists; refuse lists of different lengths."""
    if len(one) != len(other):
        raise ConfigError(f"{name}: needs as many outputs as inputs, got {len(one)} and {len(other)}.")
    return list(zip(one, other, strict=True))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one dimension."""
    return torch.cat([flat_view_of(tensor) for tensor in tensors])


def split_spans(tensor: Tensor, splits: Sequence[int], parts: int) -> list[Span]:
    """Return the spans of a tensor's parts, in elements; `splits` counts rows, and is empty for even parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % parts:
            raise ConfigError(f"all_to_all: {rows} rows do not divide among {parts} ranks; give the sizes of parts.")
        splits = [rows // parts] * parts
    if len(splits) != parts or sum(splits) != rows:
        raise ConfigError(f"all_to_all: parts of {list(splits)} rows do not make {rows} rows for {parts} ranks.")
    per_row = tensor.numel() // max(rows, 1)
    return neighbouring([split * per_row for split in splits])


def check_length(tensors: Sequence[Tensor], count: int, name: str, per: str = "rank") -> None:
    """Refuse a list that does not have `count` tensors."""
    if len(tensors) != count:
        raise ConfigError(f"{name}: needs a list of {count} tensors, one per {per}, got {len(tensors)}.")


def check_dtypes(tensors: Sequence[Tensor], name: str) -> None:
    """Refuse tensors of different dtypes."""
    found = sorted({str(tensor.dtype) for tensor in tensors})
    if len(found) > 1:
        raise ConfigError(f"{name}: needs tensors of one dtype, got {' and '.join(found)}.")


def check_shapes(tensors: Sequence[Tensor], like: Tensor, count: int, name: str) -> None:
    """Refuse a list without one tensor per rank, as large as `like` and of its dtype."""
    check_length(tensors, count, name)
    for tensor in tensors:
        check_count(tensor, like.numel(), like.dtype, name)


def check_targets(tensors: Sequence[Tensor], like: Tensor, count: int, name: str) -> None:
    """Refuse a list that cannot receive one tensor as large as `like` per rank."""
    check_shapes(tensors, like, count, name)
    for tensor in tensors:
        check_target(tensor)


def check_count(tensor: Tensor, count: int, dtype: torch.dtype, name: str) -> None:
    """Refuse a tensor of another number of elements or another dtype."""
    if tensor.numel() != count or tensor.dtype != dtype:
        raise ConfigError(
            f"{name}: needs a tensor of {count} elements of {dtype}, got {tensor.numel()} of {tensor.dtype}."
        )


def unpack(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into the outputs."""
    for index, output in enumerate(outputs):
        count = output.numel()
        write(flat[index * count : (index + 1) * count], output)


def separated(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor to change in place; if any two share memory, a copy instead, which then replaces it."""
    if len(tensors) == 1 or not _may_share_memory(tensors):
        yield from tensors
        return
    for tensor in tensors:
        if tensor.layout is torch.strided:
            check_target(tensor)
    copies = [tensor.detach().clone() for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        yield copy
        replace(tensor, copy)


def snapshot(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs, or copies if writing one output would change another one's input."""
    if len(inputs) > 1 and _may_share_memory(inputs, outputs):
        return [tensor.detach().clone() for tensor in inputs]
    return inputs


def _may_share_memory(*lists: Sequence[Tensor]) -> bool:
    """Return whether tensors at different places in lists may share memory: interlaced and sparse ones count."""
    spans = []
    for tensors in lists:
        for place, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:
                return True
            if tensor.numel():
                begin, end = addresses_of(tensor)
                spans.append((begin, end, place))
    furthest_end = 0
    furthest_place = -1
    for begin, end, place in sorted(spans):
        if begin < furthest_end and place != furthest_place:
            return True
        if end > furthest_end:
            furthest_end = end
            furthest_place = place
    return False
