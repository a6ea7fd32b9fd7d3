"""Time to the first token of a prompt that reads one module: encoded, read from the store on disk, and in the pool.

    python benchmarks/store.py [MODEL] [TOKENS]

The file is in the page cache when it is read. Prints one line for each, then a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from inlay import LLM, Prompt, SamplingParams, Schema

ROUNDS, READS = 3, 3
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def measure(model: str, tokens: int) -> dict[str, float]:
    """Seconds of each, the median of all."""
    text = "One of a row of words that all are alike. " * tokens
    prompt = Prompt.from_string('<prompt schema="s"><m/>?</prompt>')
    times: dict[str, list[float]] = {"encoded": [], "disk": [], "pool": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("encoded", *["disk"] * READS):
                llm = LLM(model, store=folder, kv_memory="2GiB", seed=0, max_num_batched_tokens=8192, max_pass_s=None)
                ids = llm.encoder.text(text)[:tokens]
                schema = f'<schema name="s"><module name="m">{llm.tokenizer.decode(list(ids))}</module></schema>'
                llm.add_schema(Schema.from_string(schema), encode=False)
                llm.generate("Some other text, so that nothing is done for the first time.", GREEDY)
                for column in (name, "pool"):
                    (output,) = llm.generate(prompt, GREEDY)
                    assert output.metrics.ttft_s is not None
                    times[column].append(output.metrics.ttft_s)
                assert (llm.stats().disk_tokens > 0) is (name == "disk")
                llm.shutdown()
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {**medians, "bytes": size, "ratio": medians["encoded"] / medians["disk"]}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "random:qwen2.5-0.5b"
    found = measure(model, int(sys.argv[2]) if len(sys.argv) > 2 else 2048)
    for name in ("encoded", "disk", "pool"):
        print(f"{name:8} {found[name] * 1000:10.1f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
