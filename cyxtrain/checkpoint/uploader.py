"""The thread that uploads checkpoints to a store: training never waits for it, and the newest one goes first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cyxtrain.checkpoint.folder import BEST, CheckpointFolder, Found, infix_of, name_of
from cyxtrain.checkpoint.remote_files import copy_remote, upload
from cyxtrain.errors import CheckpointError, counted

STALLED_SECONDS = 60.0
END_SECONDS = 1200.0
"""How long the end of a fit waits: ranks that wait for another one give up after 30 minutes."""
CLOSE_SECONDS = 2.0
"""How long a fit that ends by an error waits."""
_SHOWN_AFTER_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_END_PAUSE_SECONDS = 0.5


class Uploader:
    """Uploads files of a run from a checkpoint folder to its store.

    At most two wait, the newest and the best one, while another is uploaded. The latest one that has been uploaded and
    the best one stay on the disk until the fit ends. A failed upload is repeated until a newer file takes its place.
    `is_newcomer` returns whether a file in the store is of another run, and has been written since this fit began.
    """

    def __init__(
        self, folder: CheckpointFolder, run: Mapping[str, Any], keep_last: int, is_newcomer: Callable[[Found], bool]
    ) -> None:
        self.notes: deque[str] = deque()
        """What the user should know."""
        self.is_failing = False
        """Whether the latest upload has failed."""
        self._folder = folder
        self._run = run
        self._keep_last = keep_last
        self._is_newcomer = is_newcomer
        self._is_aside = False
        self._problem = ""
        self._num_skipped = 0
        self._condition = threading.Condition()
        # At most one of them is the best one, by its name, and one is another.
        self._waiting: list[Path] = []
        self._sending: Path | None = None
        # Local files that are in the store, with their places there.
        self._uploaded: dict[Path, str] = {}
        self._progressed_at = 0.0
        self._is_ending = False
        self._has_given_up = False
        # A daemon: a store that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._upload_all, name="cyxtrain-upload", daemon=True)

    def add(self, path: Path) -> None:
        """Upload a complete file of the folder, in place of one of its kind that still waits."""
        with self._condition:
            self._uploaded.pop(path, None)
            for older in self._like(path):
                self._waiting.remove(older)
                self._skip(older, path)
            self._waiting.append(path)
            self._condition.notify_all()
            if self._thread.ident is None:  # the first file
                self._thread.start()

    def make_room(self) -> bool:
        """Delete local files that are in the store, because the disk is full; return whether there were some."""
        with self._condition:
            is_there = bool(self._uploaded)
            for path in self._uploaded:
                _delete(path)
            self._uploaded.clear()
            return is_there

    def finish(self, show: Callable[[str], object], seconds_left: Callable[[], float]) -> bool:
        """Wait until all files are in the store, at most for 20 minutes, and for one without progress.

        `show` is called with a line if it takes over a second; `seconds_left` returns when this process has to end.
        Returns whether all files are there.
        """
        began = time.monotonic()
        is_shown = False
        with self._condition:
            self._is_ending = True
            self._progressed_at = began
            self._condition.notify_all()
        while self._thread.is_alive() and seconds_left() > 0:
            now = time.monotonic()
            if now > min(self._progressed_at + STALLED_SECONDS, began + END_SECONDS):
                break
            if now > began + _SHOWN_AFTER_SECONDS and not is_shown:
                is_shown = True
                show(f"waiting until {' and '.join(self._left())} is in {self._folder.url}")
            self._thread.join(0.05)
        with self._condition:
            self._has_given_up = True
        self.is_failing = bool(self._left())
        return not self.is_failing

    def close(self) -> list[str]:
        """End the thread, and delete local files that are in the store; return what the user should know."""
        ends_at = time.monotonic() + CLOSE_SECONDS
        if not self._is_ending:
            self.finish(lambda _: None, lambda: ends_at - time.monotonic())
        self.make_room()
        url = self._folder.url
        if self._num_skipped:
            self.notes.append(
                f"{counted(self._num_skipped, 'checkpoint')} of {name_of(self._run)} did not get to {url}: newer ones "
                "were complete before their upload began."
            )
        left = self._left()
        if left:
            reason = self._problem or "the time for it was over"
            self.notes.append(
                f"{' and '.join(left)} did not get to {url} ({reason}). Local copies are in {self._folder.path}: on "
                'this machine, resume="auto" continues from them and uploads them.'
            )
        return [*self.notes]

    def _left(self) -> list[str]:
        """Return the names of the files that are not in the store."""
        with self._condition:
            return [path.name for path in (self._sending, *self._waiting) if path is not None]

    def _like(self, path: Path) -> list[Path]:
        """Return the file of the same kind that waits: another best one, or another one."""
        return [each for each in self._waiting if _is_best(each) == _is_best(path)]

    def _skip(self, path: Path, newer: Path) -> None:
        """Leave out a file, as a newer one waits; one of the same name has replaced it."""
        if path != newer:
            self._num_skipped += 1
            _delete(path)

    def _upload_all(self) -> None:
        pause = 1.0
        # Once the fit has ended.
        tries_left = 2
        while self._take():
            if self._attempt():
                pause = 1.0
            elif self._is_ending:
                tries_left -= 1
                if not tries_left:
                    return
                time.sleep(_END_PAUSE_SECONDS)
            else:
                with self._condition:
                    self._condition.wait_for(lambda: self._is_ending, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _take(self) -> bool:
        """Wait for a file to upload, and take it; False: the fit has ended, and none is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._is_ending)
            if not self._waiting or self._has_given_up:
                return False
            # The best one last: it may be another one's copy.
            self._waiting.sort(key=_is_best)
            self._sending = self._waiting.pop(0)
            return True

    def _attempt(self) -> bool:
        """Upload the file that was taken; return whether that succeeded."""
        path = self._sending
        assert path is not None
        try:
            self._upload(path)
        except Exception as error:  # whatever a store's library raises
            if not self.is_failing:
                self.notes.append(f"{error} Training continues, and the upload is repeated.")
            self.is_failing = True
            self._problem = str(error).rstrip(".")
            with self._condition:
                self._sending = None
                newer = self._like(path)
                if newer:
                    self._skip(path, newer[0])
                else:
                    self._waiting.append(path)
            return False
        with self._condition:
            self._sending = None
        self.is_failing = False
        self._problem = ""
        return True

    def _upload(self, path: Path) -> None:
        name = self._name_in_store(path.name)
        url = f"{self._folder.url}/{name}"
        same = [place for other, place in self._uploaded.items() if _is_same(path, other)]
        if same:
            copy_remote(same[0], url)
        else:
            upload(path, url, self._note_progress)
        with self._condition:
            if path in self._waiting:  # a newer one has its name
                return
            if not _is_best(path):
                for older in [each for each in self._uploaded if not _is_best(each)]:
                    _delete(older)
                    del self._uploaded[older]
            self._uploaded[path] = url
        if self._keep_last and not _is_best(path):
            # Only now: what this run resumed from stays until a newer one is complete.
            self._prune(self._folder.path / name)

    def _prune(self, newest: Path) -> None:
        try:
            self._folder.prune(self._run.get("id"), self._keep_last, newest)
        except CheckpointError as error:
            # What has been uploaded is complete nevertheless.
            self.notes.append(f"{error} keep_last={self._keep_last} deletes nothing there from now on.")
            self._keep_last = 0

    def _name_in_store(self, name: str) -> str:
        """Return a file's name in the store; with this run's id, if a run that began later has taken its name."""
        if not self._is_aside:
            taken = [found for found in self._folder.in_store() if found.path.name == name and self._is_newcomer(found)]
            if taken:
                self._is_aside = True
                self.notes.append(
                    f"{name_of(taken[0].run)} is writing to {self._folder.url}, too: the checkpoints of "
                    f"{name_of(self._run)} have {infix_of(self._run)} in their names. Use another folder for each "
                    "training (checkpoint_dir)."
                )
        if self._is_aside:
            return self._folder.aside(name, self._run)
        return name

    def _note_progress(self, *_: object, **__: object) -> None:
        self._progressed_at = time.monotonic()


def _is_best(path: Path) -> bool:
    return path.name.startswith(BEST)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_same(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return False
