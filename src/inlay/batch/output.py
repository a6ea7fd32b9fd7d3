"""The output file of a batch, written line by line and resumable.

OUTPUT.state records the input, model and settings of the answers, because OpenAI's format has no place for them. The
output itself records the finished requests: delete a line of it, and the next run answers that request again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from inlay.api.dialect import OPENAI, Dialect
from inlay.api.failures import Failure
from inlay.batch.requests import BatchCounts, Entry, Index
from inlay.errors import ParameterError

_ID = "batch_req_"

Settings = Mapping[str, Any]


class Output:
    """OUTPUT and OUTPUT.state, locked; use it as a context manager.

    Args:
        path: OUTPUT.
        index: of the input. Requests in the output are marked as done there.
        settings: JSON values that answers depend on beside the model, by their name in messages.
        retry_failed: True to remove failed requests from OUTPUT, so that they are answered again.

    Raises:
        ParameterError: if the files cannot be written, or hold answers of another batch.
    """

    def __init__(
        self, path: Path, index: Index, settings: Settings, counts: BatchCounts, *, retry_failed: bool = False
    ) -> None:
        self.path = path
        self._state_path = path.with_name(path.name + ".state")
        self._index = index
        self._counts = counts
        self._settings = {"input": index.sha256, **settings}
        self._refuse_paths()
        self._state_file = self._locked()
        self._file: int | None = None
        try:
            self._state = self._read_state()
            self._refuse_mixing()
            if retry_failed and self._state:
                self._drop_failed()
            self._file = self._open(path, os.O_RDWR | os.O_APPEND)
            self._take_up()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def asked_of(self, loading: Settings) -> bool:
        """True if the model of the present answers was loaded with the same options."""
        return self._state.get("loading") == loading

    def begin(self, fingerprint: bytes, loading: Settings | None = None) -> None:
        """Record the model of the answers. Raises ParameterError if earlier answers came from another one.

        ``loading`` holds the model's load options as JSON values.
        """
        known = self._state.get("model")
        if known is None:
            self._state = {**self._settings, "model": fingerprint.hex(), "loading": loading or {}}
            os.ftruncate(self._state_file, 0)
            self._write(self._state_file, self._state_path, self._state)
        elif known != fingerprint.hex():
            raise self._mixed("another model or dtype")

    def answer(self, entry: Entry, body: Mapping[str, Any]) -> None:
        """Write the answer of a request."""
        self._append(entry, 200, body, None)

    def refuse(self, entry: Entry, failure: Failure, dialect: Dialect = OPENAI) -> None:
        """Write a response that reports a failed request. ``dialect`` is that of the request's url."""
        self._append(entry, failure.status, dialect.error_body(failure), None)
        self._counts.failed += 1

    def refuse_line(self, entry: Entry, failure: Failure) -> None:
        """Write an error for a line that is no request, in the file's own form, without a response."""
        self._append(entry, None, None, OPENAI.error_body(failure)["error"])
        self._counts.failed += 1

    def _append(
        self, entry: Entry, status: int | None, body: Mapping[str, Any] | None, error: Mapping[str, Any] | None
    ) -> None:
        name = f"{_ID}{entry.line}"
        response = None if body is None else {"status_code": status, "request_id": name, "body": body}
        assert self._file is not None, "an output is open while it is used"
        self._write(
            self._file, self.path, {"id": name, "custom_id": entry.custom_id, "response": response, "error": error}
        )

    def _write(self, file: int, path: Path, value: Any) -> None:
        """Write a line of JSON through to the operating system, so that it survives a crash of this process."""
        line = memoryview(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        try:
            while line:
                line = line[os.write(file, line) :]
        except OSError as error:
            raise ParameterError(
                f"{path}: cannot be written ({error.strerror}); what it holds is good: make room and run the command "
                "again",
                code="batch.unwritable_output",
            ) from None

    def _refuse_paths(self) -> None:
        if not self.path.parent.is_dir():
            raise ParameterError(
                f"{self.path}: there is no folder {self.path.parent}; make it first", code="batch.invalid_output"
            )
        if any(path.exists() and path.samefile(self._index.path) for path in (self.path, self._state_path)):
            raise ParameterError(
                f"{self.path}: is the input itself; give the output another name", code="batch.invalid_output"
            )
        for path in (self.path, self._state_path):
            if path.exists() and not path.is_file():
                raise ParameterError(
                    f"{path}: is no regular file; give the output another name", code="batch.invalid_output"
                )

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | os.O_CREAT, 0o666)
        except OSError as error:
            raise ParameterError(
                f"{path}: cannot be written ({error.strerror}); give another path", code="batch.unwritable_output"
            ) from None

    def _locked(self) -> int:
        """Open the state file, locked against other processes."""
        file = self._open(self._state_path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ParameterError(
                f"{self.path}: another inlay batch is writing it; wait for its end", code="batch.output_in_use"
            ) from None
        return file

    def _read_state(self) -> dict[str, Any]:
        """Return the content of the state file; empty for a new one."""
        text = self._state_path.read_bytes()
        if not text:
            return {}
        try:
            state = json.loads(text)
        except ValueError:
            state = None
        if not isinstance(state, dict) or "model" not in state:
            raise ParameterError(
                f"{self._state_path}: is no state of a batch; delete it and {self.path}, or move both",
                code="batch.damaged_state",
            )
        return state

    def _refuse_mixing(self) -> None:
        empty = not self.path.exists() or not self.path.stat().st_size
        if empty:
            self._state = {}  # a batch without answers may be replaced
        elif not self._state:
            raise ParameterError(
                f"{self.path}: exists, and {self._state_path.name}, which names its batch, is missing; give another "
                "output, or delete the file",
                code="batch.other_output",
            )
        for name, value in self._settings.items():
            if self._state and self._state.get(name) != value:
                raise self._mixed(f"another {name}")

    def _mixed(self, what: str) -> ParameterError:
        return ParameterError(
            f"{self.path}: holds answers of {what}; give another output, or delete it and {self._state_path.name}",
            code="batch.other_output",
        )

    def _drop_failed(self) -> None:
        """Rewrite the output without failed requests, in one step."""
        with self.path.open("rb") as file:
            kept = [line for line in file if not _failed(line)]
        new = self.path.with_name(self.path.name + ".kept")
        try:
            with new.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            new.chmod(self.path.stat().st_mode & 0o777)
            new.replace(self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise ParameterError(
                f"{new}: cannot be written ({error.strerror}); make room and run it again",
                code="batch.unwritable_output",
            ) from None

    def _take_up(self) -> None:
        """Mark finished requests, and drop an incomplete last line."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._mark(number, line)
                whole += len(line)
        assert self._file is not None, "the output is open"
        os.ftruncate(self._file, whole)
        self._counts.done_before = self._index.done

    def _mark(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            known = self._index.mark_done(int(row["id"].removeprefix(_ID)), row["custom_id"])
            succeeded = _succeeded(row)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            known = succeeded = False
        if not known:
            raise ParameterError(
                f"{self.path}:{number}: is no answer to an open request of {self._index.path}; remove the line, or "
                "give another output",
                code="batch.other_output",
            )
        self._counts.answered += succeeded
        self._counts.failed += not succeeded

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if not os.fstat(self._state_file).st_size:  # nothing has begun
            self._state_path.unlink(missing_ok=True)
            if self._file is not None and not self.path.stat().st_size:
                self.path.unlink()
        os.close(self._state_file)


def _succeeded(row: Any) -> bool:
    """True if a line of the output holds an answer."""
    return row["response"] is not None and row["response"]["status_code"] == 200


def _failed(line: bytes) -> bool:
    """True if a line reports a failed request. An unreadable line is kept for the next reader."""
    try:
        return not _succeeded(json.loads(line))
    except (ValueError, TypeError, KeyError):
        return False
