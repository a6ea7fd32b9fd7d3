"""Who decodes: inlay, stock transformers, llama.cpp. Each is opened, and then runs as often as it is asked to.

Every run answers the same prompt greedily. The seconds that count begin at the first token of the answer, so that the
prompt's own computation is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from inlay.bench.stock import load_stock
from inlay.bench.timing import Meter
from inlay.llm import LLM
from inlay.models.interface import attention_implementation
from inlay.types import SamplingParams

_WARM_UP = 2  # tokens; a large model's first run may be the only one that is timed


def stream(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, tuple[int, ...]]:
    """Seconds from the first token to the last of ``tokens`` more, and all of them."""
    params = SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    started, answer = 0.0, tuple[int, ...]()
    for output in llm.stream(prompt, params):
        started = started or time.perf_counter()
        answer = output.outputs[0].token_ids
    return time.perf_counter() - started, answer


@contextmanager
def stock_answers(name: str, dtype: str, prompt: list[int], tokens: int) -> Iterator[Meter]:
    """Stock transformers: sdpa and a DynamicCache, the loop written out, which is faster than ``generate``."""
    model = load_stock(name, dtype)
    stock_loop(model, prompt, _WARM_UP)
    yield lambda: stock_loop(model, prompt, tokens)[0]


@torch.inference_mode()
def stock_loop(model: PreTrainedModel, prompt: list[int], tokens: int) -> tuple[float, tuple[int, ...]]:
    """As ``stream``, for a stock model."""
    cache = DynamicCache(config=model.config)
    with attention_implementation(model, "sdpa"):
        chosen = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        last = chosen.logits[:, -1:].argmax(-1)
        answer = [int(last)]
        started = time.perf_counter()
        for _ in range(tokens):
            last = model(last, past_key_values=cache, use_cache=True).logits.argmax(-1)
            answer.append(int(last))
        return time.perf_counter() - started, tuple(answer)
