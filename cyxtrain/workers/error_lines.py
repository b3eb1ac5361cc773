"""What a launcher shows of errors in a rank's stderr: a user's mistake once, and no traceback of Ctrl-C."""

from __future__ import annotations

import re

from cyxtrain import errors
from cyxtrain.environment.uncaught import HEADER

TRACEBACK = b"Traceback (most recent call last):"
_SHORT = HEADER.encode()
_IN_ONE_LINE = (errors.ConfigError, errors.CheckpointError, errors.BackendUnavailableError, errors.NonFiniteError)
"""What the command line prints for a mistake."""
_RANKS = re.compile(rb"(?:\[rank\d+\]: )*")
"""What PyTorch puts before each line of a traceback, once for each group that a program has made."""
_MISTAKE = re.compile(
    rb"^%s(?:%s|(?:%s): )"
    % (_RANKS.pattern, re.escape(_SHORT), b"|".join(kind.__name__.encode() for kind in _IN_ONE_LINE)),
    re.MULTILINE,
)


def is_mistake(stderr: bytes | None) -> bool:
    """Return whether the last error of a rank is a user's mistake, printed in short."""
    return _MISTAKE.search((stderr or b"").rpartition(TRACEBACK)[2]) is not None


class ErrorFilter:
    """Leaves out of a rank's stderr a mistake that another rank has printed, and tracebacks of Ctrl-C."""

    def __init__(self, label: str, mistakes: dict[bytes, str]) -> None:
        self._label = label
        self._mistakes = mistakes
        self._held: list[bytes] = []  # the beginning of an error
        self._is_dropping = False
        self.hides_interrupts = False
        """Set when the launcher has sent SIGINT."""

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines to print, with those that were held back."""
        printed: list[bytes] = []
        for line in lines:
            text = _RANKS.sub(b"", line, count=1)
            begins = text.startswith(_SHORT) or (self.hides_interrupts and text.startswith(TRACEBACK))
            in_one_line = not begins and _MISTAKE.match(text) is not None
            if begins or in_one_line:
                printed += self.finish()
            if begins or in_one_line or self._held:
                self._held.append(line)
                if in_one_line or not (begins or text.startswith(b" ")):  # the message follows the frames
                    self._is_dropping = self._is_left_out(text)
                    printed += [] if self._is_dropping else self._held
                    self._held = []
            elif not (self._is_dropping and text.startswith(b" ")):  # the message continues
                self._is_dropping = False
                printed.append(line)
        return printed

    def finish(self) -> list[bytes]:
        """Return the lines that are held back, and forget them."""
        held, self._held = self._held, []
        return held

    def _is_left_out(self, message: bytes) -> bool:
        texts = [_RANKS.sub(b"", line, count=1) for line in self._held]
        if texts[0].startswith(TRACEBACK):
            return message.startswith(b"KeyboardInterrupt")
        return self._mistakes.setdefault(b"\n".join(texts), self._label) != self._label
