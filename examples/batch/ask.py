"""Answers the batch beside this file, and prints every answer with the number of cached tokens of its prompt.

python examples/batch/ask.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from inlay import AsyncLLM, Schema
from inlay.batch import BatchCounts, BatchJob, run_batch

HERE = Path(__file__).parent


def main() -> None:
    schema = Schema.from_file(HERE.parent / "records" / "records.xml")
    counts = BatchCounts()
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        job = BatchJob(input=HERE / "requests.jsonl", output=answers, names=["demo"], schemas=[schema])
        run_batch(job, lambda: AsyncLLM("demo", kv_memory="64MiB"), lambda stage, done, total: None, counts)
        for row in map(json.loads, answers.read_text().splitlines()):
            show(row["custom_id"], row["response"]["body"])
    print(f"{counts.cached_share:.0%} of all prompt tokens came from the cache")


def show(name: str, body: dict) -> None:
    for choice in body["choices"]:
        print(f"{name:12} {choice.get('text') or choice['message']['content']}")
    usage, cached = body["usage"], body["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(f"{'':12} ({cached} tokens cached, {usage['prompt_tokens'] - cached} computed)")


if __name__ == "__main__":
    main()
