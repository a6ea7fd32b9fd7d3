"""Text that is read after other text equals its KV of the earlier prompt, moved with the model's rotary code."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, SamplingParams
from inlay.prompt.composed import CachedSpan, compose
from tests.model.api.tool_templates import tool_model
from tests.model.equivalence.oracle import PromptCacheOracle
from tests.model.equivalence.recorder import close

HISTORY = "Tell me about the files of the folder: which are there, and how large are they? " * 2


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {name[:1]: {"type": "string"}}}
    function = {"name": name, "description": f"This tool will {name} a file. ", "parameters": parameters}
    return {"type": "function", "function": function}


def spelled(ids, start: int) -> list[tuple[int, int]]:
    return list(zip(ids, range(start, start + len(ids)), strict=True))


def assemble(llm: LLM, oracle: PromptCacheOracle, prompt: dict, earlier: PromptCacheOracle | None) -> None:
    """Compute a prompt part by part: modules after their context, and moved text from the earlier oracle."""
    request = llm.processor.process(
        prompt, SamplingParams(max_tokens=1), llm.policy_for(prompt, "modular", None, cache_salt=None)
    )
    stored = frozenset(spec.key for part in request.parts for spec in part.candidates if llm.store.get(spec))
    for part in compose(request, stored, texts=llm.store if earlier is not None else None):
        if not isinstance(part, CachedSpan):
            oracle.add_fresh(list(part.ids), part.start)
        elif part.spec.detached:
            assert earlier is not None
            at = part.spec.start + part.first
            assert earlier.positions == sorted(earlier.positions)
            first = earlier.positions.index(at)
            shift = part.start - at
            for layer in range(len(oracle.keys)):
                own = slice(first, first + part.length)
                keys, values = earlier.keys[layer], earlier.values[layer]
                oracle.keys[layer].append(oracle.moved(torch.cat(keys, 2)[:, :, own], shift, layer))
                oracle.values[layer].append(torch.cat(values, 2)[:, :, own])
            oracle.positions += range(part.start, part.start + part.length)
        else:
            context = [pair for spec in part.spec.context for pair in spelled(spec.ids, spec.start)]
            oracle.add_module(context, spelled(part.spec.ids, part.spec.start), part.start)


@pytest.mark.parametrize("family", ["qwen", "mistral"])
def test_moved_text_equals_the_kv_of_the_earlier_prompt(family: str) -> None:
    loaded = tool_model(family)
    llm = LLM(loaded, kv_memory="32MiB", seed=0)
    one = {"messages": [{"role": "user", "content": HISTORY}], "tools": [tool("read"), tool("write"), tool("list")]}
    more = [{"role": "assistant", "content": "There are three."}, {"role": "user", "content": "Why?"}]
    two = {"messages": [*one["messages"], *more], "tools": [tool("list"), tool("read")]}
    first, second = PromptCacheOracle(loaded), PromptCacheOracle(loaded)
    llm.distributions([one], [[5, 6]], reuse="modular")
    assemble(llm, first, one, None)
    assemble(llm, second, two, first)
    (got,) = llm.distributions([two], [[5, 6]], reuse="modular")
    close(got[:1], second.logits[-1][None].log_softmax(-1))
    usage = llm.generate([two], SamplingParams(max_tokens=1), reuse="modular")[0].usage
    assert usage.moved_tokens >= len(HISTORY)
