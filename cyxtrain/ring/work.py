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
from cyxtrain.ring.wire.payload import beside

_RELEASED: collections.deque[Work] = collections.deque(maxlen=4096)
"""Works that Python has let go of last. Where PyTorch's C++ still holds one, it finds the methods here.

It may wait for a work long after the call: DistributedDataParallel does so for the collective that counts its ranks.
Without its Python half C++ would wait for ever; and nothing tells Python when it does not hold it any more.
"""
_KEPT_BYTES = 4096
"""Of a result of such a work; what is larger would keep memory."""


def _small(result: Any) -> Any:
    """Return a small result; None for others."""
    size = 0 if result is None else sum(tensor.numel() * tensor.element_size() for tensor in _flat(result))
    return result if size <= _KEPT_BYTES else None


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
    """The same for a call of PyTorch's with `async_op=True`."""

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

        Raises CollectiveTimeoutError if it is not done after `timeout`, and continues, and CyxtrainError in a callback
        that waits for a later collective.
        """
        if self._thread.is_current and not self._pending.done:
            raise CyxtrainError(
                "a callback of a collective waits for one that was started later, which cannot begin before the "
                "callback ends. Wait for it outside the callback."
            )
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
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
        """Return its error; None: there is none so far."""
        return self._pending.error

    def result(self) -> list[Any]:
        """Return the result tensors, once it is done."""
        self.wait()
        result: list[Any] = self._pending.outcome()
        return result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result or the error.

        Give it a callback that starts a collective before you start another one: otherwise their order differs by rank.
        """
        over: torch.futures.Future[Any] = torch.futures.Future()
        outcome = over.then(lambda _: self._pending.outcome())
        self._pending.when_done(lambda: over.set_result(None))
        return outcome


class KeptPostedWork(PostedWork):
    """The same for a call of PyTorch's."""

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
        """Return the rank that a message came from; of recv from any source, once it is done."""
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
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


def _without_inner_frames(error: CyxtrainError, handled: BaseException | None) -> CyxtrainError:
    """Return an error whose traceback leads to the call only; `handled`: what the caller was handling, shown before."""
    error.__context__, error.__suppress_context__ = handled, error.__cause__ is not None
    return error.with_traceback(None)


class CallOptions(NamedTuple):
    """The options of a collective, under PyTorch's names."""

    asyncOp: bool = False  # noqa: N815
    timeout: timedelta | None = None
    reduceOp: Any = dist.ReduceOp.SUM  # noqa: N815
    rootRank: int = 0  # noqa: N815


def timeout_of(opts: Any) -> timedelta | None:
    """Return a call's own timeout; None for a negative one, which is how PyTorch says none."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""By the name of an argument of PyTorch's short forms, the option that it sets."""


def _inputs(_: Any, *tensors: Any) -> Any:
    """Return a collective's second argument; the first of one, and nothing of a barrier."""
    return tensors[:2][-1:]


def collective(
    name: str, tensors: int = 1, short: Sequence[str] = ("timeout",), inputs: Callable[..., Any] = _inputs
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a method that does a collective and returns its result into one that returns PyTorch's work.

    Args:
        name: A profiler shows it with "ring:" before.
        tensors: Number of arguments that are tensors or lists of them. Another one, `opts`, is PyTorch's options.
        short: Arguments of PyTorch's short form instead of options, in order: "op", "root", "timeout".
        inputs: Returns the input tensors, from the object and these arguments.
    """
    is_profiling = torch_compat.is_profiling  # small calls take microseconds: a name less to look up

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def ask(self: Any, *args: Any, **named: Any) -> DoneWork | PostedWork:
            opts = named.pop("opts", None) if len(args) <= tensors else args[tensors]
            if not isinstance(getattr(opts, "asyncOp", None), bool):
                opts = _options(name, short, [opts, *args[tensors + 1 :]], named)
            end = None
            if is_profiling():
                end = torch_compat.begin_profiled(f"ring:{name}", _flat(inputs(self, *args[:tensors])))
            thread = self._group.collective_thread(asynchronous=opts.asyncOp)
            if thread is not None:
                call = functools.partial(method, self, *args[:tensors], **named, opts=opts)
                return _post(thread, call, end, opts)
            handled = sys.exc_info()[1]
            try:
                result = method(self, *args[:tensors], **named, opts=opts)
            except CyxtrainError as error:
                raise _without_inner_frames(error, handled)  # noqa: B904
            except KeyboardInterrupt:
                # Also between the halves of a collective, where nothing moves: the others are in its second half.
                self._group.fail("it was interrupted in a collective by KeyboardInterrupt(): start all ranks again.")
                raise
            finally:
                if end is not None:
                    end()
            # C++ may hold the work of a call; not of the package's own calls.
            return KeptDoneWork(result) if opts.asyncOp and type(opts) is not CallOptions else DoneWork(result)

        return ask

    return decorate


def _post(
    thread: CollectiveThread, call: Callable[[], Any], end: Callable[[], None] | None, opts: Any
) -> DoneWork | PostedWork:
    """Make a call in another thread, and call `end` when it is done."""
    pending = thread.post(beside(call))
    if end is not None:
        pending.when_done(end)
    if opts.asyncOp:
        return PostedWork(pending, thread) if type(opts) is CallOptions else KeptPostedWork(pending, thread)
    pending.wait()
    return DoneWork(pending.outcome())


def _options(name: str, short: Sequence[str], given: Sequence[Any], named: dict[str, Any]) -> CallOptions:
    """Return the options of a call in PyTorch's short form; remove them from `named`."""
    if len(given) > len(short):
        raise TypeError(f"{name}: takes {', '.join(short)} after the tensors, got {len(given)} arguments.")
    found = dict(zip(short, given, strict=False))
    found |= {argument: named.pop(argument) for argument in short if argument in named}
    if found.get("root") is not None:
        found["root"] = operator.index(found["root"])
    return CallOptions(**{_OPTIONS[argument]: value for argument, value in found.items() if value is not None})


def _flat(given: Any) -> list[Tensor]:
    """Return all tensors of nested lists."""
    return [given] if isinstance(given, Tensor) else [tensor for part in given for tensor in _flat(part)]
