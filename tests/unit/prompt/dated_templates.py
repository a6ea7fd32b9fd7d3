"""Excerpts of public chat templates: the parts that write a date, and the turns around them."""

from __future__ import annotations

_TURNS = (
    "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
)
_LLAMA_HEADER = (
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Cutting Knowledge Date: December 2023\\n' }}"
    "{{- 'Today Date: ' + date_string + '\\n\\n' }}{{- system_message }}{{- '<|eot_id|>' }}"
)
_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

LLAMA_3_1 = (
    "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    + _SYSTEM
    + _LLAMA_HEADER
    + _TURNS
)
LLAMA_3_2 = (
    "{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}"
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}" + _SYSTEM + _LLAMA_HEADER + _TURNS
)
GPT_OSS = (
    "{%- if model_identity is not defined %}{%- set model_identity = 'You are ChatGPT.' %}{%- endif %}"
    "{{- '<|start|>system<|message|>' + model_identity + '\\n' }}{{- 'Knowledge cutoff: 2024-06\\n' }}"
    "{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\n' }}"
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- 'Reasoning: ' + reasoning_effort + '<|end|>' }}"
    "{%- for message in messages %}{%- if message.role in ['system', 'developer'] %}"
    "{{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
SMOLLM3 = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages[0].role == 'system' -%}{%- set system_message = messages[0].content -%}"
    "{%- set messages = messages[1:] -%}{%- else -%}{%- set system_message = '' -%}{%- endif -%}"
    "{%- if '/system_override' in system_message -%}"
    "{{- system_message.replace('/system_override', '').rstrip() + '<|im_end|>\\n' -}}"
    "{%- else -%}{{- '## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\n' -}}"
    "{%- set today = strftime_now('%d %B %Y') -%}{{- 'Today Date: ' ~ today ~ '\\n' -}}"
    "{{- 'Reasoning Mode: ' + ('/think' if enable_thinking else '/no_think') + '\\n\\n' -}}"
    "{{- '## Custom Instructions\\n\\n' + system_message + '<|im_end|>\\n' -}}{%- endif -%}" + _CHATML
)
MISTRAL_SMALL_3 = (
    "{%- set today = strftime_now('%Y-%m-%d') %}"
    "{%- set default_system_message = 'You are Mistral Small 3. The current date is ' + today + '.' %}{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = default_system_message %}{%- endif %}"
    "{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
QWEN_3 = "{%- if enable_thinking is defined and enable_thinking is false %}{%- set off = true %}{%- endif %}" + _CHATML
