"""A marker in a store's folder: runs on other machines see who is writing there."""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from cyxtrain.checkpoint.folder import writer_of
from cyxtrain.checkpoint.remote_files import create_remote, read_text_of, remove_remote, write_remote
from cyxtrain.environment.processes import Process, State, state_of, this_process
from cyxtrain.errors import CyxtrainError, brief

RENEW_SECONDS = 20.0
STALE_SECONDS = 120.0
"""A run whose marker is older has been killed."""
_CLOSE_SECONDS = 2.0
_NAME = ".cyxtrain-live.json"
_LIMIT_BYTES = 1 << 16


class LiveMarker:
    """Tells runs on other machines that a run writes to the folder `url` of a store, from `claim` to `close`.

    A folder has one marker, with the id and the name of a run, its process, its machine and the time. On S3 only one of
    two runs that begin at once gets it, by a put with a condition; elsewhere a run looks before it writes.

    A thread renews the time every 20 seconds. A killed run leaves its marker. Another run replaces it after two
    minutes, by the clocks of both machines, or at once if the process was on this machine. The same run replaces it at
    once when it is resumed: if its other process is alive, that one finds the marker changed, and calls `tell` with a
    line.

    Errors of the store are ignored: training does not depend on the marker.
    """

    def __init__(self, url: str, run: Mapping[str, Any], tell: Callable[[str], object]) -> None:
        self._folder = url
        self._url = f"{url}/{_NAME}"
        self._facts = {
            "run": run.get("id"),
            "name": writer_of(run),
            "process": astuple(this_process(platform.node())),
            "token": secrets.token_hex(8),
        }
        self._tell = tell
        self._is_over = threading.Event()
        # A daemon: a store that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._renew, name="cyxtrain-live", daemon=True)

    def claim(self) -> list[str]:
        """Write the marker, and renew it from now on, unless another run is live; return as `others`."""
        with contextlib.suppress(CyxtrainError):
            if not create_remote(self._url, self._content()):
                found = self.others()
                if found:
                    return found
                write_remote(self._url, self._content())
            self._thread.start()
        return []

    def others(self) -> list[str]:
        """Return the name of another run whose marker is there and not stale; []: there is none."""
        with contextlib.suppress(CyxtrainError):
            found = self._read()
            if found.get("run") != self._facts["run"] and _is_live(found):
                return [brief(str(found.get("name")))]
        return []

    def close(self) -> None:
        """Delete the marker if it is this run's, and wait 2 s at most for that."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _renew(self) -> None:
        while not self._is_over.wait(RENEW_SECONDS):
            with contextlib.suppress(CyxtrainError):  # the next time
                found = self._read()
                if found and found.get("token") != self._facts["token"]:
                    self._tell(
                        f"{brief(str(found.get('name')))} is writing to {self._folder}, too. End one of the two, or "
                        "use another folder for each training (checkpoint_dir)."
                    )
                    return
                write_remote(self._url, self._content())
        with contextlib.suppress(CyxtrainError):
            if self._read().get("token") == self._facts["token"]:
                remove_remote(self._url)

    def _content(self) -> bytes:
        return json.dumps(self._facts | {"time": time.time()}).encode()

    def _read(self) -> dict[str, Any]:
        """Return the marker that is there; {} if there is none, or something else is in its place."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(read_text_of(self._url, _LIMIT_BYTES))
            if isinstance(found, dict):
                return found
        return {}


def _is_live(found: Mapping[str, Any]) -> bool:
    with contextlib.suppress(KeyError, TypeError, ValueError):  # not a marker
        is_gone = state_of(Process(*found["process"]), this_process(platform.node())) is State.GONE
        return not is_gone and bool(time.time() - found["time"] < STALE_SECONDS)
    return False
