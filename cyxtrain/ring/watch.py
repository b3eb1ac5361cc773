"""What ranks say beside the ring: an abort with its cause, a goodbye, or nothing any more.

One thread per group hears all control connections. The first error of a group is kept for ever: it is told to
all others, then every link is stopped, so that whoever waits wakes and finds the cause here.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

from cyxtrain.errors import CollectiveMismatchError, CyxtrainError, PeerLostError, error_from_facts
from cyxtrain.ring.frames import (
    CONTROL_HEADER_BYTES,
    Control,
    FrameError,
    control_frame,
    decode_control_body,
    decode_control_header,
)

_CAUSE_SECONDS = 1.0
"""How long a broken data link waits for the cause, which comes on another connection."""


class Watch:
    """Hears and tells why a group ends.

    Attributes:
        rank: This rank, as errors name it.

    Args:
        rank: This rank, as errors name it.
        controls: The control connection to each other rank; the watch owns them from now on.
        stop_links: Wakes everybody who waits on a link of the group; called once, when the group ends.
    """

    def __init__(self, rank: int, controls: dict[int, socket.socket], stop_links: Callable[[], None]) -> None:
        self.rank = rank
        self._controls = controls
        self._stop_links = stop_links
        self._changed = threading.Condition()
        self._failure: CyxtrainError | None = None
        self._departed: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        self._heard = {peer: bytearray() for peer in controls}
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="cyxtrain-watch", daemon=True)
        for sock in controls.values():
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread.start()

    @property
    def failure(self) -> CyxtrainError | None:
        """The first error of the group, or None."""
        return self._failure

    def fail(self, error: CyxtrainError) -> CyxtrainError:
        """Keeps the first error, tells it to all others, then stops every link.

        Returns:
            The error that counts: an earlier one, or this one.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure = error
            self._say(Control.ABORT, error.to_facts())
            self._stop_links()
            self._changed.notify_all()
        return error

    def explain(self, peer: int, reason: str) -> CyxtrainError:
        """Returns why the link to `peer` broke: the cause somebody told, or that the peer is lost.

        Waits up to a second: the cause travels on another connection than the data.
        """
        if self.has_left(peer):
            return CollectiveMismatchError(
                f"rank {peer} has left (finalize, or the end of its program) after {self._departed[peer]} "
                f"collectives, and rank {self.rank} still needs it. All ranks must make the same calls.",
                rank=peer,
            )
        return self._failure or PeerLostError(
            f"rank {peer} is lost: the connection to it broke ({reason}). "
            f"Look at the output of rank {peer} and at the network, and start all ranks again.",
            rank=peer,
        )

    def has_left(self, peer: int) -> bool:
        """Returns whether `peer`, whose link has ended, said goodbye before; waits up to a second for a word."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or peer in self._departed, _CAUSE_SECONDS)
            return self._failure is None and peer in self._departed

    def tell_waiting(self, sequence: int, peer: int) -> None:
        """Tells all that this rank has been waiting for `peer` for long, in the collective of that number."""
        with self._changed:
            if self._failure is None:
                self._say(Control.WAITING, {"sequence": sequence, "peer": peer})

    def blame(self, sequence: int, peer: int) -> int:
        """Returns whom all wait for in the end, where this rank waits for `peer`, and `peer` perhaps for another."""
        seen, found = {self.rank}, peer
        while found not in seen:
            seen.add(found)
            number, waits_for = self._waiting.get(found, (-1, -1))
            if number != sequence:
                return found
            found = waits_for
        return peer  # they wait in a circle: nobody is more to blame than the next

    def leave(self, collectives: int) -> None:
        """Says goodbye to all, unless the group has failed, stops every link and ends the thread."""
        with self._changed:
            if self._failure is None:
                self._say(Control.GOODBYE, {"collectives": collectives})
                self._failure = CyxtrainError(
                    f"rank {self.rank} has left this group (finalize, destroy_process_group, or the end of the "
                    "program). Make a new group, or leave later."
                )
                self._stop_links()
                self._changed.notify_all()
        self._wake_writer.close()
        self._thread.join()
        for sock in self._controls.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            sock.close()
        self._wake_reader.close()

    def abandon(self) -> None:
        """Closes everything without a word, in a forked child: it has no thread of ours, and is no rank."""
        self._changed = threading.Condition()
        self._failure = CyxtrainError(
            f"this process was forked from rank {self.rank} and is no rank itself: only its parent can communicate."
        )
        for sock in (*self._controls.values(), self._wake_reader, self._wake_writer):
            sock.close()

    def _say(self, kind: Control, facts: dict[str, object]) -> None:
        frame = control_frame(kind, facts)
        for peer, sock in self._controls.items():
            if peer not in self._departed:
                # One short frame into an empty buffer: what does not fit belongs to a peer that reads no more.
                with contextlib.suppress(OSError):
                    sock.send(frame)

    def _run(self) -> None:
        try:
            self._listen()
        except BaseException as error:
            # Without this thread no loss would be noticed any more.
            self.fail(CyxtrainError(f"rank {self.rank} can no longer hear the others ({error!r}).", rank=self.rank))
            raise

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ, None)
            for peer, sock in self._controls.items():
                selector.register(sock, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, peer: int) -> bool:
        """Takes what a peer says; returns whether it may say more."""
        heard = self._heard[peer]
        try:
            part = self._controls[peer].recv(65536)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            part = b""
        heard += part
        try:
            while self._take_frame(peer, heard):
                pass
        except FrameError as error:
            self.fail(PeerLostError(f"rank {peer} said what is no frame ({error}).", rank=peer))
            return False
        if not part and peer not in self._departed:
            self.fail(
                PeerLostError(
                    f"rank {peer} is lost: its process has ended without a word (killed, or out of memory?). "
                    f"Look at the output of rank {peer}, and start all ranks again.",
                    rank=peer,
                )
            )
        return bool(part)

    def _take_frame(self, peer: int, heard: bytearray) -> bool:
        if len(heard) < CONTROL_HEADER_BYTES:
            return False
        kind, length = decode_control_header(heard)
        if len(heard) < CONTROL_HEADER_BYTES + length:
            return False
        facts = decode_control_body(heard[CONTROL_HEADER_BYTES : CONTROL_HEADER_BYTES + length])
        del heard[: CONTROL_HEADER_BYTES + length]
        if kind is Control.ABORT:
            if "(reported by rank " not in str(facts.get("message")):
                facts["message"] = f"{facts.get('message')} (reported by rank {peer})"
            self.fail(error_from_facts(facts))
            return True
        numbers = [facts.get(name, 0) for name in ("collectives", "sequence", "peer")]
        if not all(isinstance(number, int) for number in numbers):
            raise FrameError("a control frame counts in something else than whole numbers")
        with self._changed:
            if kind is Control.GOODBYE:
                self._departed[peer] = numbers[0]
                self._changed.notify_all()
            else:
                self._waiting[peer] = (numbers[1], numbers[2])
        return True
