"""PyTorch's Work: what a collective returns."""

from __future__ import annotations

import collections
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from cyxtrain.environment import torch_compat
from cyxtrain.errors import CollectiveTimeoutError, CyxtrainError
from cyxtrain.ring.collective_thread import CollectiveThread, PendingCall
from cyxtrain.ring.messages import ANY_SOURCE, Mailbox, Message
from cyxtrain.ring.wire.link import Deadline
from cyxtrain.ring.wire.payload import for_another_thread

_RELEASED: collections.deque[Work] = collections.deque(maxlen=4096)
"""The last Works that Python has released, kept alive for PyTorch's C++, which may still call their methods.

C++ may wait for a Work long after the call: DistributedDataParallel does so for the collective that counts its ranks.
Without the Python half of the Work, C++ would wait for ever; and nothing tells Python when C++ has released it.
"""
_KEPT_BYTES = 4096
"""The largest result that such a Work keeps; a larger one would hold memory."""


def _small(result: Any) -> Any:
    """Return a small result; None for others."""
    if result is None:
        return None
    size = sum(tensor.numel() * tensor.element_size() for tensor in _flat(result))
    if size > _KEPT_BYTES:
        return None
    return result


class DoneWork(Work):
    """A finished collective; the call itself raised any error."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Any]:
        """Return the tensors that hold the result."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class KeptDoneWork(DoneWork):
    """A finished collective whose Work PyTorch's C++ may hold: it was called with `async_op=True`."""

    def __del__(self, keep: Callable[[Work], None] = _RELEASED.append) -> None:
        self._result = _small(self._result)
        keep(self)


class PostedWork(Work):
    """A collective that runs in another thread."""

    def __init__(self, pending: PendingCall, thread: CollectiveThread) -> None:
        super().__init__()
        self._pending = pending
        self._thread = thread

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; return True, or raise its error.

        Raises CollectiveTimeoutError if it is not done after `timeout`; the collective continues. Raises CyxtrainError
        in a callback that waits for a later collective.
        """
        if self._thread.is_current and not self._pending.done:
            raise CyxtrainError(
                "a callback of a collective waits for one that was started later, which cannot begin before the "
                "callback ends. Wait for it outside the callback."
            )
        seconds: float | None = None
        if timeout is not None and timeout > timedelta(0):
            seconds = timeout.total_seconds()
        if not self._pending.wait(seconds):
            raise CollectiveTimeoutError(
                f"wait() timed out after {seconds} s; the collective continues until its deadline."
            )
        self._pending.outcome()
        return True

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._pending.done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self._pending.done and self._pending.error is None

    def exception(self) -> BaseException | None:
        """Return its error; None if it has not failed so far."""
        return self._pending.error

    def result(self) -> list[Any]:
        """Return the result tensors, once it is done."""
        self.wait()
        result: list[Any] = self._pending.outcome()
        return result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result or the error.

        If a callback starts a collective, add it before you start another one: otherwise their order differs by rank.
        """
        done: torch.futures.Future[Any] = torch.futures.Future()
        # C++ does not see an error that Python sets on a future, but one that a function of `then` raises.
        outcome = done.then(lambda _: self._pending.outcome())
        self._pending.when_done(lambda: done.set_result(None))
        return outcome


class KeptPostedWork(PostedWork):
    """A collective in another thread whose Work PyTorch's C++ may hold."""

    def __del__(self, keep: Callable[[Work], None] = _RELEASED.append) -> None:
        self._pending.trim(_small)
        keep(self)


class MessageWork(Work):
    """A send or recv; `wait` moves it, and every other message of the group. `finish` is called when it is done."""

    def __init__(
        self,
        mailbox: Mailbox,
        message: Message,
        tensor: Tensor,
        finish: Callable[[], object],
        timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._message = message
        self._tensor = tensor
        self._finish: Callable[[], object] | None = finish
        self._timeout_seconds = timeout_seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received; return True."""
        seconds = self._timeout_seconds
        if timeout is not None and timeout > timedelta(0):
            seconds = timeout.total_seconds()
        handled = sys.exc_info()[1]
        try:
            self._mailbox.wait(self._message, Deadline(seconds))
        except CyxtrainError as error:
            raise _without_inner_frames(error, handled)  # noqa: B904
        return self._finished()

    def is_completed(self) -> bool:
        """Return whether it is done, after moving what can move."""
        if not self._message.done:
            self._mailbox.progress()
        return self._message.done and self._finished()

    def is_success(self) -> bool:
        """Return whether it is done."""
        return self._message.done

    def result(self) -> list[Tensor]:
        """Return the tensor that was sent or received into."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Return the rank that a message came from; for a recv from any source, once it is done."""
        if self._message.peer == ANY_SOURCE:
            raise RuntimeError("the source of a recv is known when it has arrived: wait() first.")
        return self._message.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the tensor, after waiting."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def _finished(self) -> bool:
        finish = self._finish
        if finish is not None:
            self._finish = None
            finish()
        return True


def _without_inner_frames(error: CyxtrainError, handled: BaseException | None) -> CyxtrainError:
    """Return an error whose traceback leads to the call only; `handled` is the exception that the caller handles."""
    error.__context__ = handled
    error.__suppress_context__ = error.__cause__ is not None
    return error.with_traceback(None)


class CallOptions(NamedTuple):
    """The options of a collective, under PyTorch's names."""

    asyncOp: bool = False  # noqa: N815
    timeout: timedelta | None = None
    reduceOp: Any = dist.ReduceOp.SUM  # noqa: N815
    rootRank: int = 0  # noqa: N815


def timeout_of(opts: Any) -> timedelta | None:
    """Return a call's own timeout; None if it has none, or PyTorch's unset one, which is negative."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The option that each argument of PyTorch's short forms sets."""


def _inputs(_: Any, *tensors: Any) -> Any:
    """Return the input among a collective's arguments: the second one, after the output, or the only one, if any."""
    return tensors[1:2] if len(tensors) > 1 else tensors


def collective(
    name: str, num_tensors: int = 1, short: Sequence[str] = ("timeout",), inputs: Callable[..., Any] = _inputs
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a method that does a collective and returns its result into one that returns PyTorch's work.

    Args:
        name: The name in a profiler, after "ring:".
        num_tensors: Number of arguments that are tensors or lists of them. Another one, `opts`, is PyTorch's options.
        short: Arguments of PyTorch's short form instead of options, in order: "op", "root", "timeout".
        inputs: Returns the input tensors, from the object and these arguments.
    """
    # Small calls take microseconds: a local name is faster to look up.
    is_profiling = torch_compat.is_profiling

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def perform(self: Any, *args: Any, **named: Any) -> DoneWork | PostedWork:
            opts = named.pop("opts", None) if len(args) <= num_tensors else args[num_tensors]
            if not isinstance(getattr(opts, "asyncOp", None), bool):
                opts = _options(name, short, [opts, *args[num_tensors + 1 :]], named)
            end_profiled = None
            if is_profiling():
                end_profiled = torch_compat.begin_profiled(f"ring:{name}", _flat(inputs(self, *args[:num_tensors])))
            thread = self._group.engine.thread_for(asynchronous=opts.asyncOp)
            if thread is not None:
                call = functools.partial(method, self, *args[:num_tensors], **named, opts=opts)
                return _post(thread, call, end_profiled, opts)
            handled = sys.exc_info()[1]
            try:
                result = method(self, *args[:num_tensors], **named, opts=opts)
            except CyxtrainError as error:
                raise _without_inner_frames(error, handled)  # noqa: B904
            except KeyboardInterrupt:
                # It may come between two parts of a collective, where the executor does not see it: the other ranks
                # would wait in the second part.
                reason = "it was interrupted in a collective by KeyboardInterrupt(): start all ranks again."
                self._group.engine.fail(reason)
                raise
            finally:
                if end_profiled is not None:
                    end_profiled()
            if opts.asyncOp and _is_held(opts):
                return KeptDoneWork(result)
            return DoneWork(result)

        return perform

    return decorate


def _is_held(opts: Any) -> bool:
    """Return whether C++ may hold the Work of a call: it came through PyTorch, with PyTorch's own options."""
    return type(opts) is not CallOptions


def _post(
    thread: CollectiveThread, call: Callable[[], Any], end_profiled: Callable[[], None] | None, opts: Any
) -> DoneWork | PostedWork:
    """Make a call in another thread, and call `end_profiled` when it is done."""
    pending = thread.post(for_another_thread(call))
    if end_profiled is not None:
        pending.when_done(end_profiled)
    if not opts.asyncOp:
        pending.wait()
        return DoneWork(pending.outcome())
    if _is_held(opts):
        return KeptPostedWork(pending, thread)
    return PostedWork(pending, thread)


def _options(name: str, short: Sequence[str], given: Sequence[Any], named: dict[str, Any]) -> CallOptions:
    """Return the options of a call in PyTorch's short form; remove them from `named`."""
    if len(given) > len(short):
        raise TypeError(f"{name}: takes {', '.join(short)} after the tensors, got {len(given)} arguments.")
    found = dict(zip(short, given, strict=False))
    for argument in short:
        if argument in named:
            found[argument] = named.pop(argument)
    if found.get("root") is not None:
        found["root"] = operator.index(found["root"])
    options = {_OPTIONS[argument]: value for argument, value in found.items() if value is not None}
    return CallOptions(**options)


def _flat(given: Any) -> list[Tensor]:
    """Return all tensors of nested lists."""
    if isinstance(given, Tensor):
        return [given]
    return [tensor for part in given for tensor in _flat(part)]
