"""Time to the first token of a prompt that reads one module: encoded, read from the store on disk, and in the pool.

    python benchmarks/store.py [MODEL] [TOKENS]

The file is in the page cache when it is read. Prints one line for each, then a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from inlay import LLM, Prompt, SamplingParams, Schema

ROUNDS, READS = 3, 3
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = Prompt.from_string('<prompt schema="s"><m/>?</prompt>')


def measure(model: str, tokens: int, folder: Path) -> dict[str, float]:
    """Seconds of each, the median of all."""
    llm = LLM(model, store=folder, kv_memory="2GiB", seed=0, max_num_batched_tokens=8192, max_pass_s=None)
    ids = llm.encoder.text("One of a row of words that all are alike. " * tokens)[:tokens]
    text = llm.tokenizer.decode(list(ids))
    llm.add_schema(Schema.from_string(f'<schema name="s"><module name="m">{text}</module></schema>'), encode=False)
    llm.generate("Some other text, so that nothing is done for the first time. " * 20, GREEDY)
    (tier,) = llm.client.residency.tiers
    times: dict[str, list[float]] = {"encoded": [], "disk": [], "pool": []}

    def ask(name: str) -> None:
        (output,) = llm.generate(PROMPT, GREEDY)
        assert output.metrics.ttft_s is not None
        times[name].append(output.metrics.ttft_s)

    for _ in range(ROUNDS):
        llm.store.clear()
        for entry in tier.iterate():
            tier.delete(entry.key)
        ask("encoded")
        while llm.stats().unwritten_segments:
            time.sleep(0.01)
        for _ in range(READS):
            llm.store.clear()
            ask("disk")
            ask("pool")
    size = llm.stats().disk.bytes if llm.stats().disk else 0
    llm.shutdown()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {**medians, "bytes": size, "ratio": medians["encoded"] / medians["disk"]}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "random:qwen2.5-0.5b"
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    with tempfile.TemporaryDirectory() as folder:
        found = measure(model, tokens, Path(folder))
    for name in ("encoded", "disk", "pool"):
        print(f"{name:8} {found[name] * 1000:10.1f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
