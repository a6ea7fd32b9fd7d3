"""A tiny engine and the columns over it."""

from __future__ import annotations

import pytest

from inlay.client.async_llm import AsyncLLM
from inlay_lab.bench.throughput.columns import Continuous, Ours, Stock
from tests.conftest import tiny


@pytest.fixture(scope="module")
def llm():
    made = AsyncLLM(tiny("llama"), seed=0, kv_memory="16MiB", max_num_seqs=4)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def columns(llm):
    model = tiny("llama").model
    return {
        "inlay": Ours(llm, reuse=True),
        "off": Ours(llm, reuse=False),
        "stock": Stock(model, 4),
        "transformers": Continuous(model, 4),
    }
