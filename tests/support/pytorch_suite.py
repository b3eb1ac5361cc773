"""Runs PyTorch's own distributed_test.py, which comes with its wheel, over a backend; no pytest here.

`python tests/support/pytorch_suite.py ring results.json [test names]`: each test is a world of three processes, forked
from one that has imported everything. What PyTorch runs for Gloo alone runs for the ring, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import unittest
from typing import Any

WORLD_SIZE = 3
SECONDS = 100
"""How long one test may take."""


class AsGloo(str):
    """The name of a backend that tests take for Gloo where they ask which one it is."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(backend: str) -> type[Any]:
    """Returns PyTorch's tests as a class that runs them over a backend."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)  # forked processes cannot use the threads of the first one
    common_distributed.TIMEOUT_DEFAULT = SECONDS
    common_distributed.TIMEOUT_OVERRIDE.clear()
    from torch.testing._internal.distributed import distributed_test

    import cyxtrain  # noqa: F401 - it registers the backend "ring"

    distributed_test.BACKEND = AsGloo(backend)  # now that tests have been chosen as for Gloo
    if backend != "gloo":
        see_events_of(backend, distributed_test)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]  # PyTorch's tests have no annotations
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Suite


def see_events_of(backend: str, distributed_test: Any) -> None:
    """Lets tests look for a backend's calls in traces, by name, number and shapes.

    They also want each to be `is_async`, which is true of all that Gloo does: the ring's calls are where they are.
    """
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    found = distributed_test.get_profiling_event

    def events(*args: Any, **named: Any) -> list[Any]:
        chosen: list[Any] = found(*args, **named)
        for event in chosen:
            event.is_async = True
        return chosen

    distributed_test.get_profiling_event = events


class Results(unittest.TestResult):
    """How each test ended: "passed", "skipped: why" or "failed: why"."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self.found[test._testMethodName] = "passed"
        print(test._testMethodName, end=": ", file=sys.stderr, flush=True)

    def stopTest(self, test: Any) -> None:  # noqa: N802
        super().stopTest(test)
        print(self.found[test._testMethodName].splitlines()[0], file=sys.stderr, flush=True)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self.found[test._testMethodName] = f"skipped: {reason}"

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        text = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]  # private: what unittest prints
        self.found[test._testMethodName] = f"failed: {text}"

    addError = addFailure  # noqa: N815


def main(backend: str, file: str, *names: str) -> None:
    cls, results = load(backend), Results()
    unittest.TestSuite(cls(name) for name in names or unittest.defaultTestLoader.getTestCaseNames(cls)).run(results)
    with open(file, "w") as out:
        json.dump(results.found, out, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
