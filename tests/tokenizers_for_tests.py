"""Small fast tokenizers built like those of real families, and the chat templates of real families.

Everything is trained on the few lines of text below: nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """\
The harbour lies on the east side of the island, and the ferry leaves it twice a day. You are a helpful assistant.
A ticket costs 12.50 for the crossing; children under six travel free, and bicycles cost 3.00 each way.
In winter the wind comes from the north and the ferry may wait for an hour, or stay where it is until the morning.
The user asks a question, the system gives the rules, and the assistant answers in one sentence or in two.
def crossing(day: int, hour: int) -> bool:
    if day in (6, 7):
        return hour in range(9, 18)
    return hour > 6
The museum is open from ten to five. Its oldest room holds the charts that the pilots drew, and the newest holds the
lamp of the old lighthouse, which was turned by hand, every twenty seconds, through every night for ninety years.
Where can we eat? The house at the end of the pier serves fish; the one behind the church serves everything else.
"""
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _trained(pre_tokenizer: Any, size: int, special: tuple[str, ...], alphabet: list[str]) -> dict[str, Any]:
    """The vocabulary and merges of a BPE trained on TEXT."""
    trainee = Tokenizer(models.BPE())
    trainee.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    trainee.train_from_iterator([TEXT], trainer)
    model = json.loads(trainee.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _wrapped(backend: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


def _byte_level(special: tuple[str, ...], plain: tuple[str, ...] = (), **byte_level: bool) -> Tokenizer:
    splits = pre_tokenizers.ByteLevel(**(byte_level or {"add_prefix_space": False}))
    backend = Tokenizer(models.BPE(**_trained(splits, 450, (), pre_tokenizers.ByteLevel.alphabet())))
    backend.pre_tokenizer = splits
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return backend


def _in_front(backend: Tokenizer, bos: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )


@cache
def gpt2() -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2 and Qwen, with a space in front of a text, and <think> as a plain added token."""
    backend = _byte_level(CHATML, ("<think>", "</think>", "  ", "    "), add_prefix_space=True, use_regex=True)
    return _wrapped(backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@cache
def llama3() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose post-processor adds <|begin_of_text|>."""
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    backend = _byte_level(special)
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _in_front(backend, special[0])]
    )
    return _wrapped(backend, bos_token=special[0], eos_token=special[3])


def _sentencepiece(special: tuple[str, ...], normalizer: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    splits = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained = _trained(splits, 700, ("<unk>", "<s>", "</s>", *_BYTES), [])
    backend = Tokenizer(models.BPE(**trained, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ("<unk>", "<s>", "</s>", *special)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names])
    backend.post_processor = _in_front(backend, "<s>")
    return _wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def llama2() -> PreTrainedTokenizerFast:
    """BPE with byte fallback whose normalizer puts ▁ in front of a text."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece((), spaces, None)


@cache
def metaspace(scheme: str) -> PreTrainedTokenizerFast:
    """The same with the dummy space in the pre-tokenizer. scheme: "first" or "always"."""
    special = ("<start_of_turn>", "<end_of_turn>")
    return _sentencepiece(special, None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


@cache
def unigram() -> PreTrainedTokenizerFast:
    """Unigram with every special token, and <unk>, as probable pieces of its vocabulary, and a strip of text ends."""
    letters = dict.fromkeys("▁" + "".join(sorted({*TEXT, *"<>/|_"} - {" ", "\n"})), -8.0)
    pieces = {"<unk>": -1.0, "<s>": -1.0, "</s>": -1.0, "<0x0A>": -1.0, "<think>": -1.0, "the": -4.0, "▁the": -3.0}
    backend = Tokenizer(models.Unigram(list((pieces | letters).items()), unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return _wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


QWEN25 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {%- if loop.last %}{%- set content = '<think>\n\n</think>\n\n' + content.lstrip('\n') %}{%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LOWER = QWEN25.replace("message.content +", "message.content | lower +")
LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- else %}
    {%- set loop_messages = messages %}{%- set system_message = false %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system_message != false %}
        {%- set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
    {%- else %}{%- set content = message['content'] %}{%- endif %}
    {%- if message['role'] == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}
"""
LLAMA3 = """\
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim %}
    {%- set content = content + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}
"""
# puts the system turn into the last user turn, as version 0.3 does
MISTRAL_LAST = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system, rest = messages[0]['content'], messages[1:] %}
{%- else %}{%- set system, rest = none, messages %}{%- endif %}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if system is not none and loop.last else '') }}
        {{- message['content'] + '[/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_FAMILIES = {
    "qwen2.5": (gpt2, QWEN25),
    "qwen3": (gpt2, QWEN3),
    "lower": (gpt2, LOWER),
    "llama2": (llama2, LLAMA2),
    "llama3": (llama3, LLAMA3),
    "mistral": (llama2, MISTRAL),
    "mistral-last": (llama2, MISTRAL_LAST),
    "gemma": (lambda: metaspace("always"), GEMMA),
    "bare": (gpt2, BARE),
}


def family(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of that family."""
    build, template = _FAMILIES[name]
    return with_template(build(), template)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    """The same tokenizer with another chat template."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed
