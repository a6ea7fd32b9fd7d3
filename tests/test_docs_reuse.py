"""The example of docs/reuse.md runs, and does what the page says."""

from __future__ import annotations

from inlay import LLM

from .pages import DOCS, blocks


def test_parts_of_messages():
    (block,) = [block for block in blocks(DOCS / "reuse.md") if block.language == "python"]
    llm = LLM("demo", seed=0)
    exec(block.text, names := {"llm": llm})
    parts = [names["question"], names["document"]]
    document = len(llm.encoder.text(names["document"]["text"]))
    (alone,) = llm.chat([{"role": "user", "content": parts}])
    assert alone.usage.cached_tokens < document  # without the system turn the context is another
    (moved,) = llm.chat(
        [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": parts}]
    )
    assert moved.usage.module_tokens == document
