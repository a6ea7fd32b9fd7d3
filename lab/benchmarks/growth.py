"""What do prompts, schemas, queues and pools cost beside the computation, as they grow?

    python lab/benchmarks/growth.py

Prints seconds of one thread's own time at each size. If a row takes ten times as long at ten times the size, the cost
grows linearly. The last line of stdout is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from inlay.engine.encoder import Encoding
from inlay.engine.scheduler import Admission, Scheduler
from inlay.kv.identity import Context, KeyMaker, TokenRun
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.models.load import load_tokenizer
from inlay.models.quantize import Int8Linear
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.composed import compose_parts
from inlay.prompt.contexts import SchemaSpecs, in_encoding_order
from inlay.prompt.conversation import lay_out_conversation
from inlay.prompt.inputs import Conversation
from inlay.prompt.layout import SchemaLayout, lay_out_schema
from inlay.prompt.placement import lay_out_prompt
from inlay.prompt.request import PromptPart
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


def composed_of_modules(modules: int) -> Callable[[], Any]:
    layout, parts, at = laid_out(modules), [], 0
    for run in layout.runs:
        parts.append((run, at))
        at += len(run.ids)
    specs = specs_of(layout)
    return lambda: compose_parts(
        [PromptPart(run.ids, at, candidates=(specs.spec(run, frozenset()),), encode=True) for run, at in parts]
    )


def composed_joins(parts: int) -> Callable[[], Any]:
    ids = tuple(range(100))
    placed = [PromptPart(ids, 100 * number) for number in range(parts)]
    return lambda: compose_parts(placed)


def chat_turns(turns: int) -> Callable[[], Any]:
    said = [{"type": "text", "text": "a few words"}]
    messages = [{"role": ("user", "assistant")[n % 2], "content": said} for n in range(turns)]
    return lambda: lay_out_conversation(Conversation(messages), ENCODER, TEMPLATE)


def placement(texts: int) -> Callable[[], Any]:
    schema = Schema.from_json({"name": "s", "content": ["Hello"]})
    layout = lay_out_schema(schema, ENCODER, TEMPLATE)
    resolved = resolve(schema, Prompt.from_json({"schema": "s", "content": ["new words "] * texts}))
    return lambda: lay_out_prompt(resolved, layout, ENCODER, TEMPLATE, packed=True)


def free_spans(spans: int) -> Callable[[], Any]:
    pool = KVPool(2 * spans, 1, 1)
    held = [pool.allocate(1) or () for _ in range(2 * spans)]
    for each in held[::2]:
        pool.free(each)
    return lambda: [pool.free(each) for each in held[1::2]]


def evictions(segments: int) -> Callable[[], Any]:
    pool = KVPool(segments, 1, 1)
    store = SegmentStore(pool, KEYS)
    for token in range(segments):
        slots = store.allocate(1)
        store.insert(TokenRun((token,), 0, Context()), slots)
        pool.free(slots)
    return lambda: [store.allocate(1) for _ in range(2000)]


class Boundless:
    """A pool that always has room."""

    def admit(self, job: Any, alone: bool) -> Admission:
        return Admission.ADMITTED

    def grow(self, job: Any) -> bool:
        return True

    def release(self, job: Any) -> None:
        pass


def line(jobs: int, *, steps: int = 0) -> Callable[[], Any]:
    """Add and remove jobs, or run ``steps`` scheduler steps while they wait."""
    scheduler: Scheduler[Encoding] = Scheduler(1, 64, 64, None, Boundless())
    waiting = [Encoding("job", (), deadline=1e9, sequences=1) for _ in range(jobs)]

    def come_and_go() -> None:
        for job in waiting:
            scheduler.add(job)
        for job in waiting[::-1]:
            scheduler.remove(job)

    if not steps:
        return come_and_go
    for job in waiting:
        scheduler.add(job)
    return lambda: [scheduler.step(0.0) for _ in range(steps)]


def quantized_head(outputs: int) -> Callable[[], Any]:
    head, none = (
        Int8Linear(torch.ones(outputs, 896, dtype=torch.bfloat16)),
        torch.zeros(1, 0, 896, dtype=torch.bfloat16),
    )
    return lambda: head(none)


ROWS: dict[str, tuple[Callable[[int], Callable[[], Any]], tuple[int, ...]]] = {
    "schema specs (modules, text between)": (schema_specs, (80, 800, 8000)),
    "splice of all modules": (composed_of_modules, (80, 800, 8000)),
    "splice joins (parts)": (composed_joins, (200, 2000, 20_000)),
    "chat turns": (chat_turns, (200, 2000, 20_000)),
    "placement (new texts)": (placement, (200, 2000, 20_000)),
    "free all chunks (free spans)": (free_spans, (2000, 20_000, 200_000)),
    "2,000 evictions (segments)": (evictions, (4000, 40_000, 400_000)),
    "line (jobs come and go)": (line, (2000, 20_000, 200_000)),
    "100 steps (jobs that wait)": (partial(line, steps=100), (2000, 20_000, 200_000)),
    "int8 head, no rows (outputs)": (quantized_head, (15_193, 151_936)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=3, help="how many sizes of each row, from the smallest on")
    parser.add_argument("--only", default="", help="rows whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, dict[int, float]] = {}
    for name, (prepared, sizes) in ROWS.items():
        if not name.startswith(arguments.only):
            continue
        for size in sizes[: arguments.sizes]:
            work = prepared(size)
            began = time.thread_time()
            work()
            seconds.setdefault(name, {})[size] = round(time.thread_time() - began, 4)
        print(f"{name:38}", *(f"{size:>7,}: {took:7.3f} s" for size, took in seconds[name].items()))
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
