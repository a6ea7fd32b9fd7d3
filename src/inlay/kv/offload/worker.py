"""A thread that runs jobs in order, for disk work that must not block other threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)


class Worker:
    """One daemon thread, started by the first job. A failed job is logged, and the next one runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Ignored after close."""
        with self._lock:
            if self._closed:
                return
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, timeout: float) -> bool:
        """Wait for the current job and drop the others. Returns True if the thread has ended in time."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while not self._closed:
            job = self._jobs.get()
            if job is None:
                return
            try:
                job()
            except BaseException:  # a panic of a library written in Rust is not an Exception
                logger.exception("a job of %s failed", self._name)
