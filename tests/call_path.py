"""The files of the package that one call runs through, from ``LLM.generate`` or from HTTP.

``python -m tests.call_path`` writes the lists into docs/architecture.md. The model has random weights. A file counts if
any of its functions is called, on any thread; importing it does not count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import inlay
from inlay import LLM, SamplingParams, Schema
from tests.conftest import tiny

SOURCE = Path(inlay.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- call paths: written by python -m tests.call_path -->", "<!-- end of call paths -->"

EXPLANATION = "These are the files of which a function is called, on any thread. A property is a function, too."

SCHEMA = Schema.from_string(
    '<schema name="trip">Plan a trip. <module name="miami">Miami has beaches and art deco houses.</module>'
    '<module name="oslo">Oslo has fjords, forests and museums.</module></schema>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
BODY = {"messages": [{"role": "user", "content": "Where are beaches?"}], "max_tokens": 4, "temperature": 0}


class Recorder:
    """Records the files whose functions are called while ``on`` is set. Make it before the threads that it watches."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()
        self._seen: dict[str, str | None] = {}

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Watch this thread and all threads that start in the block."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def files_of(self, call: Callable[[], object]) -> list[str]:
        """Call a function and return the files of the package that it ran through."""
        self.files.clear()
        self.on = True
        try:
            call()
        finally:
            self.on = False
        return sorted(self.files)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.on:
            return
        name = frame.f_code.co_filename
        if name not in self._seen:
            path = Path(name)
            self._seen[name] = path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None
        found = self._seen[name]
        if found is not None and not _is_import(frame):
            self.files.add(found)


def _is_import(frame: FrameType) -> bool:
    """True for the body of a module or a class. A class body has no locals of its own arguments."""
    return frame.f_code.co_name == "<module>" or "__qualname__" in frame.f_code.co_names[:2]


def generate() -> list[str]:
    """The files of ``LLM.generate`` for a prompt with recomputed tokens, whose modules are stored."""
    with Recorder().watching() as recorder:
        llm = LLM(tiny("llama"), kv_memory="8MiB", seed=1)
        llm.add_schema(SCHEMA)
        prompt = SCHEMA.prompt().use("miami").use("oslo").text("Where are beaches?")

        def ask() -> None:
            llm.generate([prompt], GREEDY, reuse="modular", recompute="linked:2")

        ask()
        files = recorder.files_of(ask)
        llm.shutdown()
    return files


def chat() -> list[str]:
    """The files of one POST to /v1/chat/completions, whose prompt is stored."""
    from tests.server.server.conftest import CHAT, running, small_model

    with Recorder().watching() as recorder:
        llm = small_model()
        with running(llm) as site:
            site.post(CHAT, **BODY)
            files = recorder.files_of(lambda: site.post(CHAT, **BODY))
        llm.shutdown()
    return files


def table() -> str:
    """The part of the page between the marks."""
    lines = [
        BEGIN,
        "",
        "A file is listed if the call runs one of its functions or properties, on any thread.",
    ]
    for title, files in (
        ("`LLM.generate` with two stored modules and recomputed tokens", generate()),
        ("`POST /v1/chat/completions` with a stored prompt", chat()),
    ):
        packages: dict[str, list[str]] = {}
        for file in files:
            package, _, name = file.rpartition("/")
            packages.setdefault(package, []).append(name.removesuffix(".py"))
        lines += ["", f"{title} runs through {len(files)} files:", ""]
        lines += [f"- {package or 'inlay'}: {', '.join(names)}" for package, names in packages.items()]
    return "\n".join([*lines, "", END])


def main() -> None:
    """Write the lists into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table() + after, encoding="utf-8")


if __name__ == "__main__":
    main()
