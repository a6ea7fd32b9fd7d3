"""The requirements on every family, as functions that a test or the survey calls: invariants 1 to 5 on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inlay import LLM, RequestOutput, SamplingParams, Schema
from inlay.api.dialect import OPENAI
from inlay.api.openai import Endpoint
from inlay.api.tools.formats import model_tools
from inlay.attention.registry import get_backend
from inlay.authoring.memory import CODECS, shape_of
from inlay.models.families import family_of
from inlay.models.interface import attention_implementation
from inlay.models.linear import FrozenLinear
from inlay.models.standard import ROUTERS
from inlay.models.weights import WeightForm
from tests.adapters import ALL, linear_layers, updates, with_updates, write_adapter
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import PROMPTS, SCHEMA, oracle_logits
from tests.model.families.configs import WINDOW, in_bfloat16, stock_model, tiny, tiny_bfloat16, tiny_with_tools
from tests.model.families.oracle import ComposedPrompt, masked, stock_implementation, untouched

PACKED, INT8 = WeightForm("packed"), WeightForm("packed", "int8")


def _ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _steps(name: str, prompt: list[int], output) -> Tensor:
    """The stock model's logits of every step of an answer."""
    return untouched(name, prompt + list(output.outputs[0].token_ids)[:-1])[len(prompt) - 1 :]


def prefill_and_decode(name: str) -> None:
    """A ragged batch, some of it past the window."""
    prompts = [_ids(length, seed) for seed, length in enumerate((1, 17, 2 * WINDOW + 5))]
    for prompt, (output, logits) in zip(prompts, Recorder(tiny(name), reuse="off").greedy(prompts, 9), strict=True):
        close(logits, _steps(name, prompt, output))


def chunks(name: str) -> None:
    """Prompts in chunks of 7 tokens, which cut through each other."""
    prompts = [_ids(length, seed) for seed, length in enumerate((40, 3))]
    recorder = Recorder(tiny(name), reuse="off", max_num_batched_tokens=7)
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 3), strict=True):
        close(logits, _steps(name, prompt, output))


def exact_reuse(name: str) -> None:
    """The same prompt again, and one that begins alike, read what is stored and equal the stock model."""
    recorder = Recorder(tiny(name), reuse="exact")
    for end in (_ids(9, 1), _ids(9, 1), _ids(5, 2)):
        prompt = _ids(40) + end
        ((output, logits),) = recorder.greedy([prompt], 3)
        close(logits, _steps(name, prompt, output))
    assert output.usage.cached_tokens >= 32
    assert output.usage.exact_tokens == output.usage.cached_tokens


def gaps(name: str) -> None:
    """Positions that jump, without reuse."""
    recorder = Recorder(tiny(name), reuse="off", positions="schema")
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    ((output, logits),) = recorder.greedy([schema.prompt().use("food").text("Where to?")], 3)
    ids, positions = list(output.prompt_token_ids), list(output.prompt_positions)
    assert positions != list(range(len(positions)))
    answer = list(output.outputs[0].token_ids)
    positions += [positions[-1] + 1 + step for step in range(len(answer) - 1)]
    ids += answer[:-1]
    expected = masked(name, ids, positions, torch.ones(len(ids), len(ids)).tril().bool())
    close(logits, expected[-len(answer) :])


def _modules(name: str, reuse: str, positions: str, which: str) -> None:
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse=reuse, positions=positions)
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    prompt = PROMPTS[which](schema.prompt())
    ((output, logits),) = recorder.greedy([prompt], 3)
    answer = list(output.outputs[0].token_ids)
    expected = oracle_logits(loaded, recorder.llm, prompt, answer, reuse, positions, make_oracle=ComposedPrompt)
    close(logits, torch.stack(expected))
    assert output.usage.module_tokens > 0


def modules(name: str) -> None:
    """Modules at the positions of their schema, alone and after the text that is always there."""
    _modules(name, "isolated", "schema", "order and gaps")
    _modules(name, "anchored", "schema", "nested, short and full arguments")


def shifts(name: str) -> None:
    """Modules read elsewhere than they were encoded, where the family says that they can be."""
    _modules(name, "isolated", "packed", "order and gaps")
    _modules(name, "anchored", "packed", "nested, short and full arguments")


def shifts_are_allowed(name: str) -> bool:
    """The result of the probe at load."""
    return LLM(tiny(name), kv_memory="16MiB").positions_for("isolated") == "packed"


def claims_shifts(name: str) -> bool:
    """True if the family claims shifts."""
    config = tiny(name).model.config
    return family_of(config).allows(config).shifts is not None


def packed_weights(name: str) -> None:
    """Weights joined and packed for speed compute the same."""
    loaded, prompt = tiny(name, PACKED), _ids(30)
    assert any(isinstance(module, FrozenLinear) for module in loaded.model.modules())
    ((output, logits),) = Recorder(loaded, reuse="off").greedy([prompt], 2)
    close(logits, _steps(name, prompt, output))


def bfloat16(name: str) -> None:
    """As near to the model in fp32 as the stock model in bfloat16 is, teacher-forced; shifts are allowed there too."""
    recorder = Recorder(tiny_bfloat16(name), reuse="off")
    _, ours, theirs, truth = errors_in_bfloat16(name, recorder, _ids(30))
    assert ours.norm() < 2 * theirs.norm() + 0.01 * truth.norm()
    assert (recorder.llm.positions_for("isolated") == "packed") == claims_shifts(name)


def errors_in_bfloat16(
    name: str, recorder: Recorder, prompt: list[int]
) -> tuple[RequestOutput, Tensor, Tensor, Tensor]:
    """Answer a prompt. Returns the output, and by row: our distance to fp32, the stock model's, and the length."""
    ((output, logits),) = recorder.greedy([prompt], 8)
    ids = prompt + list(output.outputs[0].token_ids)[:-1]
    truth = untouched(name, ids)[len(prompt) - 1 :]
    stock = in_bfloat16(stock_model(name))
    with torch.inference_mode(), attention_implementation(stock, stock_implementation(name)):
        theirs = stock(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :]
    return output, *((each.float() - truth).norm(dim=-1) for each in (logits, theirs)), truth.norm(dim=-1)


def quantized_weights(name: str) -> None:
    """Linear layers in 8 bits stay near the model, but where rounding chooses other experts for a token."""
    prompts = [_ids(20, seed) for seed in range(7)]
    outputs = Recorder(tiny(name, INT8), reuse="off").greedy(prompts, 1)
    errors = []
    for prompt, (output, logits) in zip(prompts, outputs, strict=True):
        expected = _steps(name, prompt, output)
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert sorted(errors)[len(errors) // 2] < 0.2, errors


def memory(name: str) -> None:
    """The pool takes of a token what ``inlay memory`` predicts, within 1%."""
    loaded = tiny(name)
    predicted = shape_of(loaded.model.config).bytes_per_token(CODECS["fp32"])
    taken = LLM(loaded, kv_memory="16MiB").store.pool.bytes_per_token
    assert abs(taken - predicted) <= 0.01 * predicted, f"{taken} bytes a token, {predicted} predicted"


def what_layers_ask_for(name: str) -> None:
    """The windows and the sinks that the family names are those that its layers ask the backend for."""
    loaded, asked = tiny(name), list[tuple[int | None, bool]]()  # in the order of the layers
    llm = LLM(loaded, kv_memory="16MiB", reuse="off")
    kind: Any = type(get_backend())
    stock = kind.attend

    def attend(backend, query, key, value, pool, plan, layer, options):
        asked.append((options.window, options.sinks is not None))
        return stock(backend, query, key, value, pool, plan, layer, options)

    with patch.object(kind, "attend", attend):
        llm.generate([_ids(5)], SamplingParams(max_tokens=1))
    allows = family_of(loaded.model.config).allows(loaded.model.config)
    assert tuple(window for window, _ in asked if window is not None) == allows.windows
    assert {sinks for _, sinks in asked} == {allows.sinks}


def stock_calls(name: str) -> None:
    """A patch leaves the classes that it replaces unchanged for other users, such as a baseline."""
    model, ids = tiny(name).model, _ids(20)
    kept = model.config._attn_implementation
    with torch.inference_mode(), attention_implementation(model, stock_implementation(name)):
        close(model(torch.tensor([ids]), use_cache=False).logits[0], untouched(name, ids))
    assert model.config._attn_implementation == kept


def adapters(name: str) -> None:
    """An adapter of every linear layer that a pass calls once, in one batch with a request of none."""
    prompt = _ids(30)
    # layers that are read head by head, that choose experts, or that are called twice
    without = getattr(family_of(tiny(name).model.config), "unpacked", ROUTERS)
    layers = [path for path in linear_layers(tiny(name).model) if path.rpartition(".")[2] not in without]
    with TemporaryDirectory() as folder:
        write_adapter(Path(folder), tiny(name), ALL, paths=layers, exclude_modules=list(without), lora_alpha=2)
        recorder = Recorder(tiny(name), reuse="off", adapters={"all": folder})
        merged = with_updates(stock_model(name), updates(Path(folder)))
    (output, logits), (plain, others) = recorder.greedy([prompt, prompt], 3, adapter=["all", None])
    close(others, _steps(name, prompt, plain))
    ids = prompt + list(output.outputs[0].token_ids)[:-1]
    with torch.inference_mode(), attention_implementation(merged, stock_implementation(name)):
        expected = merged(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :]
    close(logits, expected)


_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "required": ["at"]}}}
_TOOL["function"]["parameters"] |= {"properties": {"at": {"enum": ["sea", "sky"]}}, "additionalProperties": False}


def chat_tools(name: str) -> None:
    """A call that is asked for comes as one, and the turn after its result reads the conversation so far."""
    loaded = tiny_with_tools(name)
    llm = LLM(loaded, kv_memory="16MiB", chunk_size=16)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is there to see?"}]

    def ask(**more: Any) -> tuple[Any, Any]:
        body = {"messages": messages, "tools": [_TOOL], "temperature": 0, "max_tokens": 99, **more}
        checked, known = OPENAI.read(body, Endpoint.CHAT), llm.sampling_defaults
        call = OPENAI.translate(
            checked, default_max_tokens=None, tools=model_tools(loaded.tokenizer), reasoning=None, defaults=known
        )
        (output,) = llm.generate([call.prompts[0]], call.params)
        said = OPENAI.respond(call, [output], name="r", created=0, model=name)
        return said["choices"][0], output.usage

    choice, before = ask(tool_choice="required", parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls", choice
    called = choice["message"]["tool_calls"][0]
    assert called["function"]["name"] == "look"
    assert json.loads(called["function"]["arguments"])["at"] in ("sea", "sky")
    messages += [choice["message"], {"role": "tool", "tool_call_id": called["id"], "content": "Waves."}]
    _, after = ask(max_tokens=1)
    assert after.cached_tokens > before.prompt_tokens // 2


#: All of it; "shifts" only where the probe allows them.
CHECKS: dict[str, Callable[[str], None]] = {
    "prefill and decode": prefill_and_decode,
    "chunks": chunks,
    "exact reuse": exact_reuse,
    "gaps": gaps,
    "modules": modules,
    "shifts": shifts,
    "packed weights": packed_weights,
    "bfloat16": bfloat16,
    "int8 weights": quantized_weights,
    "memory": memory,
    "stock calls": stock_calls,
    "windows and sinks": what_layers_ask_for,
    "adapters": adapters,
    "chat tools": chat_tools,
}
