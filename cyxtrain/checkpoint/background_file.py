"""A small file in a store that is written again and again, as a log is: training never waits for the store."""

from __future__ import annotations

import threading

from cyxtrain.checkpoint.remote_files import write_remote
from cyxtrain.errors import CheckpointError, CyxtrainError

END_SECONDS = 5.0


class BackgroundFile:
    """Uploads the newest content of a file, whole, in a thread that runs while there is something to upload.

    Content is left out if newer content follows before its upload begins.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._condition = threading.Condition()
        self._is_uploading = False
        self._newest = b""
        self._uploaded = b""
        self._problem: CyxtrainError | None = None

    def write(self, content: bytes) -> None:
        """Upload content in the background; then raise the error of the latest upload, if it has failed."""
        with self._condition:
            self._newest = content
            self._start()
            problem = self._problem
        if problem is not None:
            raise problem

    def finish(self) -> None:
        """Wait 5 s at most for the newest content; if its upload fails, try it once more, for 5 s at most.

        Raises CheckpointError if it is not in the store then.
        """
        with self._condition:
            self._wait()
            if not self._is_uploading and self._uploaded is not self._newest:
                self._start()
                self._wait()
            if self._uploaded is self._newest:
                return
        raise self._problem or CheckpointError(f"Cannot write {self._url}: the store has not answered in time.")

    def _wait(self) -> None:
        self._condition.wait_for(lambda: not self._is_uploading, END_SECONDS)

    def _start(self) -> None:
        if not self._is_uploading:
            self._is_uploading = True
            # A daemon: a store that does not answer must not keep the process.
            threading.Thread(target=self._upload, name="cyxtrain-file", daemon=True).start()

    def _upload(self) -> None:
        while True:
            content = self._newest
            problem: CyxtrainError | None = None
            try:
                write_remote(self._url, content)
            except CyxtrainError as error:
                problem = error
            with self._condition:
                self._problem = problem
                if problem is None:
                    self._uploaded = content
                self._is_uploading = content is not self._newest
                self._condition.notify_all()
                if not self._is_uploading:  # after this block, that may be about the next thread
                    return
