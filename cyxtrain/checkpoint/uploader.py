"""The thread that uploads checkpoints to a store: training never waits for it, and the newest one goes first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cyxtrain.checkpoint.folder import BEST, CheckpointFolder, Found, infix_of, name_of
from cyxtrain.checkpoint.remote_files import copy_remote, remove_leftovers_of, upload
from cyxtrain.errors import CheckpointError, counted

STALLED_SECONDS = 60.0
END_SECONDS = 1200.0
"""How long the end of a fit waits: ranks that wait for another one give up after 30 minutes."""
CLOSE_SECONDS = 2.0
"""How long a fit that ends by an error waits."""
_SHOWN_AFTER_SECONDS = 1.0
_SECONDS_BEFORE_LIMIT = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_END_PAUSE_SECONDS = 0.5


class Uploader:
    """Uploads files of a run from a checkpoint folder to its store.

    At most two wait, the newest and the best one, while another is uploaded; the newest stays until the fit ends. A
    failed upload is repeated until a newer file takes its place. `is_newcomer` returns whether a file in the store is
    of another run that has begun since this fit did.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        run: Mapping[str, Any],
        keep_last: int,
        is_newcomer: Callable[[Found], bool],
    ) -> None:
        self._folder = folder
        self._run = run
        self._keep_last = keep_last
        self._is_newcomer = is_newcomer
        # Of temporary files in the store: the same when this run resumes.
        self._owner = folder.aside("", run)
        self._has_left_nothing = False
        self.is_failing = False
        """Whether the latest upload has failed."""
        self._problem = ""
        self._num_skipped = 0
        self._is_aside = False
        self._condition = threading.Condition()
        self._waiting: Path | None = None
        self._sending: Path | None = None
        # The best one is the folder's file of that name.
        self._best_waits = False
        self._has_best = False
        # The latest uploaded file, and its place in the store.
        self._uploaded: tuple[Path, str] | None = None
        self._notes: deque[str] = deque()
        self._noted: set[str] = set()
        self._progressed_at = 0.0
        self._is_ending = False
        self._has_given_up = False
        # A daemon: a store that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._upload_all, name="cyxtrain-upload", daemon=True)

    def add(self, path: Path) -> None:
        """Upload a complete file of the folder, in place of one that still waits."""
        with self._condition:
            self._skip(self._waiting)
            self._waiting = path
            self._wake()

    def add_best(self) -> None:
        """Upload the best one, or copy it in the store if it is there under another name."""
        with self._condition:
            self._best_waits = True
            self._has_best = True
            self._wake()

    def make_room(self) -> bool:
        """Delete the local file that has been uploaded, because the disk is full; return whether there was one."""
        with self._condition:
            return self._uploaded is not None and _delete(self._uploaded[0])

    def take_notes(self) -> Iterator[str]:
        """Yield what the user should know since the last call."""
        while self._notes:
            yield self._notes.popleft()

    def finish(
        self,
        show: Callable[[str], object] = lambda _: None,
        seconds_left: Callable[[], float] = lambda: END_SECONDS,
    ) -> bool:
        """Wait until all files are in the store; return whether they are.

        It gives up after 20 minutes, after one without progress, and before this process has to end. `show` is called
        with a line if the wait takes over a second.
        """
        began = time.monotonic()
        is_shown = False
        with self._condition:
            self._is_ending = True
            self._progressed_at = began
            self._condition.notify_all()
        while self._thread.is_alive():
            now = time.monotonic()
            is_stalled = now - self._progressed_at > STALLED_SECONDS or now - began > END_SECONDS
            if is_stalled or seconds_left() < _SECONDS_BEFORE_LIMIT:
                break
            if now - began > _SHOWN_AFTER_SECONDS and not is_shown:
                is_shown = True
                show(f"waiting for {self._described()} to be uploaded to {self._folder.url}")
            self._thread.join(0.05)
        with self._condition:
            self._has_given_up = True
            self.is_failing = bool(self._names_left())
        return not self.is_failing

    def close(self) -> list[str]:
        """End the thread, and delete local files that are in the store; return what the user should know."""
        ends_at = time.monotonic() + CLOSE_SECONDS
        if not self._is_ending:
            self.finish(seconds_left=lambda: ends_at - time.monotonic() + _SECONDS_BEFORE_LIMIT)
        told = [*self.take_notes()]
        url = self._folder.url
        if self._num_skipped:
            told.append(
                f"{counted(self._num_skipped, 'checkpoint')} of {name_of(self._run)} did not get to {url}: newer ones "
                "were complete before their upload began."
            )
        with self._condition:
            left = self._names_left()
            best = self._folder.file(BEST)
            if self._uploaded is not None and self._uploaded[0].name not in left:
                _delete(self._uploaded[0])
            if self._has_best and best.name not in left:
                _delete(best)
        if left:
            reason = self._problem or "the time for it was over"
            told.append(
                f"{' and '.join(left)} did not get to {url} ({reason}). Local copies are in {self._folder.path}: on "
                'this machine, resume="auto" continues from them and uploads them.'
            )
        return told

    def _wake(self) -> None:
        if self._thread.ident is None:  # the first file
            self._thread.start()
        self._condition.notify_all()

    def _names_left(self) -> list[str]:
        """Return the names of the files that are not in the store."""
        paths = [path for path in (self._sending, self._waiting) if path is not None]
        if self._best_waits:
            paths.append(self._folder.file(BEST))
        return [path.name for path in paths]

    def _described(self) -> str:
        with self._condition:
            return " and ".join(self._names_left())

    def _skip(self, path: Path | None) -> None:
        if path is not None:
            self._num_skipped += 1
            _delete(path)

    def _upload_all(self) -> None:
        pause = 1.0
        # Once the fit has ended.
        tries_left = 2
        while self._take():
            if self._attempt():
                pause = 1.0
                continue
            is_ending = self._is_ending
            tries_left -= is_ending
            if not tries_left:
                return
            if is_ending:
                time.sleep(_END_PAUSE_SECONDS)
                continue
            with self._condition:
                self._condition.wait_for(lambda: self._is_ending, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _take(self) -> bool:
        """Wait for a file to upload, and take it; False: the fit has ended, and none is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._best_waits or self._is_ending)
            self._sending = self._waiting
            self._waiting = None
            return not self._has_given_up and (self._sending is not None or self._best_waits)

    def _attempt(self) -> bool:
        """Upload what was taken, and the best one if it waits; return whether that succeeded."""
        try:
            if not self._has_left_nothing:
                remove_leftovers_of(self._folder.url, self._owner)
                self._has_left_nothing = True
            if self._sending is not None:
                self._upload_file(self._sending)
            if self._best_waits:
                self._upload_best()
        except Exception as error:  # whatever a store's library raises
            self._report(error)
            with self._condition:
                newer = self._waiting
                if newer is None:
                    self._waiting = self._sending
                else:
                    self._skip(self._sending)
                self._sending = None
            return False
        self.is_failing = False
        self._problem = ""
        return True

    def _report(self, error: Exception) -> None:
        if not self.is_failing:
            self._note(f"{error} Training continues, and the upload is repeated.")
        self._problem = str(error).rstrip(".")
        self.is_failing = True

    def _upload_file(self, path: Path) -> None:
        name = self._name_in_store(path.name)
        url = f"{self._folder.url}/{name}"
        upload(path, url, owner=self._owner, progress=self._note_progress)
        with self._condition:
            before = self._uploaded
            self._uploaded = (path, url)
            self._sending = None
        if before is not None and before[0] != path:
            _delete(before[0])
        if self._keep_last:
            # Only now: what this run resumed from stays until a newer one is complete.
            self._prune(self._folder.path / name)

    def _upload_best(self) -> None:
        best = self._folder.file(BEST)
        # A later one may be marked from here on.
        self._best_waits = False
        try:
            url = f"{self._folder.url}/{self._name_in_store(best.name)}"
            if self._uploaded is not None and _is_same(best, self._uploaded[0]):
                copy_remote(self._uploaded[1], url, owner=self._owner)
            else:
                upload(best, url, owner=self._owner, progress=self._note_progress)
        except BaseException:
            self._best_waits = True
            raise

    def _prune(self, newest: Path) -> None:
        try:
            self._folder.prune(self._run.get("id"), self._keep_last, newest)
        except CheckpointError as error:
            # What is uploaded is complete nevertheless.
            self._note(f"{error} keep_last={self._keep_last} could not delete older checkpoints there.")

    def _name_in_store(self, name: str) -> str:
        """Return a file's name in the store; with this run's id, if a run that began later has taken its name."""
        if not self._is_aside:
            taken = [found for found in self._folder.in_store() if found.path.name == name]
            if any(map(self._is_newcomer, taken)):
                self._is_aside = True
                self._note(
                    f"{name_of(taken[0].run)} is writing to {self._folder.url}, too: the checkpoints of "
                    f"{name_of(self._run)} have {infix_of(self._run)} in their names. Use another folder for each "
                    "training (checkpoint_dir)."
                )
        if self._is_aside:
            return self._folder.aside(name, self._run)
        return name

    def _note(self, words: str) -> None:
        """Keep a message for the user, each only once."""
        if words not in self._noted:
            self._noted.add(words)
            self._notes.append(words)

    def _note_progress(self, *_: object, **__: object) -> None:
        self._progressed_at = time.monotonic()


def _delete(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _is_same(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return False
