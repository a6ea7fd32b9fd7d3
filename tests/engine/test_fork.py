"""A process that forks behind a load: the child gets an error at once, and the parent goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from inlay import LLM, AsyncLLM, SamplingParams

from ..conftest import tiny

PARAMS = SamplingParams(temperature=0, max_tokens=4)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_child(call: Callable[[], object]) -> str:
    """What a call raises in a forked child. The child is ended after 20 seconds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        told = "nothing was raised"
        try:
            call()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


async def ask(llm: AsyncLLM) -> list[int]:
    outputs = [output async for output in llm.generate("Once", PARAMS)]
    return list(outputs[-1].outputs[0].token_ids)


def test_a_forked_child_gets_an_error_from_llm():
    llm = LLM(tiny("llama"), kv_memory="4MiB")
    before = llm.generate("Once", PARAMS)[0].outputs[0].token_ids
    for call in (lambda: llm.generate("Once", PARAMS), lambda: llm.client.reset_prefix_cache().result()):
        assert f"made in process {os.getpid()}" in in_child(call)
    assert in_child(llm.shutdown) == "nothing was raised"
    assert llm.generate("Once", PARAMS)[0].outputs[0].token_ids == before
    llm.shutdown()


def test_a_forked_child_gets_an_error_from_async_llm():
    llm = AsyncLLM(tiny("llama"), kv_memory="4MiB")
    before = asyncio.run(ask(llm))
    assert f"made in process {os.getpid()}" in in_child(lambda: asyncio.run(ask(llm)))
    assert asyncio.run(ask(llm)) == before


def test_the_error_is_one_of_inlay():
    llm = LLM(tiny("llama"), kv_memory="4MiB")
    assert in_child(lambda: llm.generate("Once", PARAMS)).startswith("EngineDeadError")
    llm.shutdown()
