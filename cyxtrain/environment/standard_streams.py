"""File descriptors 0, 1 and 2, which programs expect to be open."""

from __future__ import annotations

import os
import sys


def open_absent() -> None:
    """Open the null device as stdin, stdout or stderr if this process was started without it (`>&-`).

    Otherwise the next file or socket would get its descriptor, and everything that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            if getattr(sys, name) is None:
                stream = open(number, "w" if number else "r", errors="replace", closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)
