"""Chat templates that know tools, after those of real families, with tokenizers that have their special tokens."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from inlay.models.families import describe
from inlay.models.load import LoadedModel, fingerprint
from inlay.models.shapes import bytes_tokenizer
from tests.conftest import CONFIGS
from tests.tokenizers_for_tests import with_template

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{%- set system, rest = '', messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if not rest %}{{- raise_exception('there is no first user message') }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format ' }}
    {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + ({'output': message.content} | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length < 9 %}{{- raise_exception('Tool call IDs need 9 characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id[-9:] }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}
"""
#: shows tools, without instructions for calls and without past calls
SIMPLE = """\
{%- for tool in tools or [] %}{{- 'You may call ' + tool.function.name + '.\n' }}{%- endfor %}
{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}
"""

#: name → template, special tokens, other added tokens
_FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "qwen": (QWEN, ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>")),
    "llama": (
        LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        (),
    ),
    "mistral": (
        MISTRAL,
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        (),
    ),
    "simple": (SIMPLE, (), ()),
    "none": ("{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}", (), ()),
}


@cache
def tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a byte, and the added tokens and the chat template of that family."""
    template, special, plain = _FAMILIES[family]
    tokenizer = with_template(bytes_tokenizer(), template)
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(list(plain))
    return tokenizer


@cache
def tool_model(family: str) -> LoadedModel:
    """A tiny model with random weights for that tokenizer."""
    tokenizer = tool_tokenizer(family)
    kind, settings = CONFIGS["llama"]
    ends = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}  # the tokenizer's count
    config = AutoConfig.for_model(kind, **{**settings, **ends})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return LoadedModel(f"tiny-{family}", model, tokenizer, describe(model), fingerprint(model))
