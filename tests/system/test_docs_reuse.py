"""The examples of docs/guides/reuse-policies.md run, and docs/reference/policies.md names every count."""

from __future__ import annotations

import dataclasses
import re

from inlay import LLM
from inlay.types import Usage
from tests.pages import DOCS, Block, blocks


def example(prefix: str) -> Block:
    """The example that holds this text."""
    (found,) = [
        each for each in blocks(DOCS / "guides/reuse-policies.md") if each.language == "python" and prefix in each.text
    ]
    return found


def test_shadow_sampling(capsys):
    exec(example("shadow=1.0").text, names := {})
    (found,) = names["llm"].divergence()
    assert capsys.readouterr().out == f"ships modular: {found.kl:.3f} nats, 1 answers\n"
    assert found.taken is None


def test_parts_of_messages_are_reused():
    block = example("cache_control")
    llm = LLM("demo", seed=0)
    exec(block.text, names := {"llm": llm})
    parts = [names["question"], names["document"]]
    document = len(llm.encoder.text(names["document"]["text"]))
    (alone,) = llm.chat([{"role": "user", "content": parts}])
    assert alone.usage.cached_tokens < document  # without the system turn the context is another
    (moved,) = llm.chat(
        [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": parts}]
    )
    assert moved.usage.module_tokens + moved.usage.exact_tokens >= document


def test_every_count_is_explained():
    counts = (DOCS / "reference/policies.md").read_text().partition("\n## Counts\n")[2].partition("\n## ")[0]
    fields = {field.name for field in dataclasses.fields(Usage)}
    assert fields == {name for row in counts.splitlines() if row.startswith("| `") for name in _names(row)}


def _names(row: str) -> list[str]:
    return re.findall(r"`(\w+)`", row.split("|")[1])
