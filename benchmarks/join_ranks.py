"""One rank of `old_vs_new.py --joins`: joins a world and leaves it, again and again."""

from __future__ import annotations

import statistics
import time

import launches

import cyxtrain as cx

_WARM_UP = 3
"""The first time is that of imports and of the ranks that start later."""


def main() -> None:
    task = launches.given()
    seconds = []
    for _ in range(_WARM_UP + task["joins"]):
        began = time.perf_counter()
        with cx.init():
            cx.barrier()
        seconds.append(time.perf_counter() - began)
    launches.report({"seconds": statistics.median(seconds[_WARM_UP:])})


if __name__ == "__main__":
    main()
