"""What do prompts and schemas cost before anything is computed, as they grow?

    python benchmarks/growth.py

A table: seconds of one thread at each size. Where a row takes ten times as long at ten times the size, the cost grows
evenly. The last line of stdout is one JSON object.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from inlay.kv.identity import KeyMaker
from inlay.models.load import load_tokenizer
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.contexts import SchemaSpecs, in_encoding_order
from inlay.prompt.conversation import lay_out_conversation
from inlay.prompt.layout import SchemaLayout, lay_out_schema
from inlay.prompt.placement import lay_out_prompt
from inlay.prompt.request import PromptPart
from inlay.prompt.splice import splice_parts
from inlay.prompt.tokens import TextEncoder

TOKENIZER = load_tokenizer("demo")
ENCODER, TEMPLATE = TextEncoder(TOKENIZER), ChatTemplate(TOKENIZER)
KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)


def laid_out(modules: int) -> SchemaLayout:
    """A schema of small modules with text between them."""
    text = "".join(f'\nDocument:\n<module name="m{n}">text number {n} of all</module>' for n in range(modules))
    return lay_out_schema(Schema.from_string(f'<schema name="s">{text}</schema>'), ENCODER, TEMPLATE)


def specs_of(layout: SchemaLayout) -> SchemaSpecs:
    return SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)


def schema_specs(modules: int) -> Callable[[], Any]:
    layout = laid_out(modules)
    return lambda: in_encoding_order(s for module in specs_of(layout).by_module().values() for s in module)


def splice_of_modules(modules: int) -> Callable[[], Any]:
    layout, parts, at = laid_out(modules), [], 0
    for run in layout.runs:
        parts.append((run, at))
        at += len(run.ids)
    specs = specs_of(layout)
    return lambda: splice_parts(
        [PromptPart(run.ids, at, candidates=(specs.spec(run, frozenset()),), encode=True) for run, at in parts]
    )


def splice_joins(parts: int) -> Callable[[], Any]:
    ids = tuple(range(100))
    placed = [PromptPart(ids, 100 * number) for number in range(parts)]
    return lambda: splice_parts(placed)


def chat_turns(turns: int) -> Callable[[], Any]:
    said = [{"type": "text", "text": "a few words"}]
    messages = [{"role": ("user", "assistant")[n % 2], "content": said} for n in range(turns)]
    return lambda: lay_out_conversation(messages, ENCODER, TEMPLATE)


def placement(texts: int) -> Callable[[], Any]:
    schema = Schema.from_json({"name": "s", "content": ["Hello"]})
    layout = lay_out_schema(schema, ENCODER, TEMPLATE)
    resolved = resolve(schema, Prompt.from_json({"schema": "s", "content": ["new words "] * texts}))
    return lambda: lay_out_prompt(resolved, layout, ENCODER, TEMPLATE, packed=True)


ROWS = {
    "schema specs (modules, text between)": (schema_specs, (80, 800, 8000)),
    "splice of all modules": (splice_of_modules, (80, 800, 8000)),
    "splice joins (parts)": (splice_joins, (200, 2000, 20_000)),
    "chat turns": (chat_turns, (200, 2000, 20_000)),
    "placement (new texts)": (placement, (200, 2000, 20_000)),
}


def main() -> None:
    seconds: dict[str, dict[int, float]] = {}
    for name, (prepared, sizes) in ROWS.items():
        for size in sizes:
            work = prepared(size)
            began = time.perf_counter()
            work()
            seconds.setdefault(name, {})[size] = round(time.perf_counter() - began, 4)
        print(f"{name:38}", *(f"{size:>7,}: {took:7.3f} s" for size, took in seconds[name].items()))
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
