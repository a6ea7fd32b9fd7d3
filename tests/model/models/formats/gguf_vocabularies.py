"""Small vocabularies for GGUF files, strings to tokenize with them, and the ids that llama.cpp gives.

``python -m tests.model.models.formats.gguf_vocabularies`` writes ``gguf_expectations.json``; it needs llama-cpp-python.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

EXPECTATIONS = Path(__file__).with_name("gguf_expectations.json")

#: Texts that tokenizers treat differently: contractions, digits, marks of many scripts, and white space.
PARTS = (
    *(
        "It's",
        "I'LL",
        " we've",
        " 1234567",
        "3.14",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " foo",
        " bar(x)",
        " =>",
    ),
    *("a+b", " `q`", "|x|", " ñandú", "…", "。", "，", " नमस्ते।", "۔عربي،", "\u00a0x", " ½²", "é", "!?", ".", "日本語"),
    *(
        "----",
        "aaaaa",
        "▁",
        "Ġ",
        "🙂",
        "the",
        " the",
        " theory",
        "word",
        " words",
        "<",
        ">",
        "|",
        "_",
        " A",
        "Straße",
        "x" * 9,
    ),
)
CONTROL = (
    "<s>",
    "</s>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "<größe>",
    "<|endoftext|>",
)
DEFINED = ("<tool_call>", "    ", "\n\n\n", "<think>", "▁▁▁", "<｜tool▁calls▁begin｜>")


def strings(count: int, seed: int = 0) -> list[str]:
    """Texts of words, marks, white space and special tokens."""
    rng = random.Random(seed)
    found = [
        "",
        " ",
        "  ",
        " a",
        "a ",
        "<s>",
        " <s> a",
        "<｜User｜> hi",
        "<｜User｜>hi<｜Assistant｜>",
        "<think>\n\nok</think> x",
    ]
    while len(found) < count:
        parts = [rng.choice(CONTROL + DEFINED if rng.random() < 0.15 else PARTS) for _ in range(rng.randint(1, 9))]
        found.append("".join(parts))
    return found


def byte_level(split: str, **more: Any) -> dict[str, Any]:
    """The metadata of a tokenizer whose merges were learned across all borders, so that another split shows."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned.train_from_iterator(
        _texts(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, max_token_length=8, show_progress=False)
    )
    merges = [" ".join(merge) for merge in json.loads(learned.to_str())["model"]["merges"]]
    words = [*letters, *(merge.replace(" ", "") for merge in merges), "ĠunmergedĠ"]
    tokens = [*dict.fromkeys(words), *CONTROL, *DEFINED]
    types = [1] * (len(tokens) - len(CONTROL + DEFINED)) + [3] * len(CONTROL) + [4] * len(DEFINED)
    found = {"model": "gpt2", "pre": split, "tokens": tokens, "token_type": types, "merges": merges}
    return found | {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")} | more


def sentencepiece(**more: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece tokenizer with a score for each token, and bytes for other text."""
    learned = Tokenizer(models.BPE())
    learned.train_from_iterator(
        [text.replace(" ", "▁") for text in _texts()],
        trainers.BpeTrainer(vocab_size=500, max_token_length=8, show_progress=False, limit_alphabet=90),
    )
    vocabulary = json.loads(learned.to_str())["model"]
    made = list(dict.fromkeys("".join(merge) for merge in vocabulary["merges"]))
    letters = [token for token in vocabulary["vocab"] if token not in made]
    special = [token for token in CONTROL if token not in ("<s>", "</s>")]
    defined = [token for token in DEFINED if token not in made]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made, *letters, *special, *defined]
    types = [2, 3, 3] + [6] * 256 + [1] * len(made + letters) + [3] * len(special) + [4] * len(defined)
    scores = [0.0] * 259 + [-float(i) for i in range(len(made + letters))] + [0.0] * len(special + defined)
    return {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores} | more


def kinds() -> dict[str, dict[str, Any]]:
    """The tokenizers of files, by a name for each."""
    splits = ("gpt-2", "llama-bpe", "qwen2", "smollm", "bloom", "default")
    return {
        **{f"gpt2 {split}": byte_level(split) for split in splits},
        "gpt2 with both ends": byte_level("qwen2", add_eos_token=True, add_bos_token=True),
        "llama": sentencepiece(),
        "llama without a space": sentencepiece(add_space_prefix=False),
        "llama without BOS": sentencepiece(add_bos_token=False),
        "llama of Phi-3": sentencepiece(name="Phi-3 Mini"),
    }


def write_vocabulary(path: Path, tokenizer: dict[str, Any], width: int = 32) -> Path:
    """A llama model of one layer with a tokenizer; keys as after ``tokenizer.ggml.`` in a file, and two more."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 512, "embedding_length": width, "block_count": 1, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "rope.dimension_count": width // 4, "vocab_size": len(tokenizer["tokens"])}
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    own = {"chat_template": "tokenizer.chat_template", "name": "general.name"}
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in tokenizer.items():
        add[type(value)](own.get(key, f"tokenizer.ggml.{key}"), value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokenizer["tokens"]), width), "blk.0.ffn_down": (width, 64)}
    shapes |= {f"blk.0.attn_{each}": (width, width) for each in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{each}": (64, width) for each in ("gate", "up")}
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (width,))
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", (rng.standard_normal(shape) * 0.05).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_BY_LLAMA = """
import ctypes, json, sys
import llama_cpp as cpp
silent = cpp.llama_log_callback(lambda level, text, data: None)
cpp.llama_log_set(silent, ctypes.c_void_p(0))
cpp.llama_backend_init()
params = cpp.llama_model_default_params()
params.vocab_only = True
texts, found = json.load(sys.stdin), []
for path in sys.argv[1:]:
    vocab = cpp.llama_model_get_vocab(cpp.llama_model_load_from_file(path.encode(), params))
    room, ids = (cpp.llama_token * 2000)(), []
    for text in texts:
        count = cpp.llama_tokenize(vocab, text.encode(), len(text.encode()), room, 2000, True, True)
        ids.append(list(room[:count]))
    ends = [i for i in range(cpp.llama_vocab_n_tokens(vocab)) if cpp.llama_vocab_is_eog(vocab, i)]
    control = [i for i in range(cpp.llama_vocab_n_tokens(vocab)) if cpp.llama_vocab_is_control(vocab, i)]
    found.append({"ids": ids, "ends": ends, "control": control})
print(json.dumps(found))
"""


def by_llama(paths: list[Path], texts: list[str]) -> list[dict[str, Any]]:
    """llama.cpp's view of texts with the tokenizers of files: ids, tokens that end an answer, control tokens."""
    command = [sys.executable, "-c", _BY_LLAMA, *map(str, paths)]
    said = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


def _texts() -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choice(PARTS) for _ in range(12)) for _ in range(80)]


def main() -> None:
    texts, tokenizers = strings(400), kinds()
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_vocabulary(Path(folder) / f"{i}.gguf", kind) for i, kind in enumerate(tokenizers.values())]
        found = by_llama(paths, texts)
    each = {name: kind | {"expected": said} for (name, kind), said in zip(tokenizers.items(), found, strict=True)}
    EXPECTATIONS.write_text(json.dumps({"texts": texts, "kinds": each}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
