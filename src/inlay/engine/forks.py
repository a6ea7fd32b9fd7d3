"""Forks: a child process has the objects of its parent and none of its threads. Waiting for one of these would hang."""

from __future__ import annotations

import os

from inlay.errors import EngineDeadError


class ThisProcess:
    """The process that an object with threads was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this is another process, forked from that one."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises EngineDeadError in another process."""
        if self.left:
            raise EngineDeadError(
                f"this engine was made in process {self._pid}, and process {os.getpid()} is a fork of that without its "
                "threads; make the LLM in the process that uses it, or start processes with the method 'spawn'"
            )
