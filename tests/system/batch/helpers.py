"""Small batches over tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from inlay import AsyncLLM
from inlay.batch import BatchCounts, BatchJob, Stage, run_batch
from inlay.models.load import LoadedModel
from tests.conftest import tiny

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """A request; greedy and short unless it says otherwise."""
    body = {"temperature": 0, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def bodies(path: Path) -> dict[str, Any]:
    """Answers by custom_id; none may have failed."""
    rows = read(path)
    assert all(row["error"] is None and row["response"]["status_code"] == 200 for row in rows), rows
    return {row["custom_id"]: row["response"]["body"] for row in rows}


def texts(path: Path) -> dict[str, list[str]]:
    """The texts of answers, by custom_id."""
    return {
        custom_id: [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]
        for custom_id, body in bodies(path).items()
    }


def run(
    source: Path,
    target: Path,
    *,
    model: LoadedModel | None = None,
    watch: Callable[[Stage, int, int], None] | None = None,
    llm: dict[str, Any] | None = None,
    names: Sequence[str] = ("tiny",),
    **job: Any,
) -> BatchCounts:
    """Run a batch in this process and return its counts."""
    counts = BatchCounts()
    settings = {"kv_memory": "16MiB", "seed": 0, **(llm or {})}
    run_batch(
        BatchJob(input=source, output=target, names=names, **job),
        lambda: AsyncLLM(model or tiny("llama"), **settings),
        watch or (lambda stage, done, total: None),
        counts,
    )
    return counts
