"""Models by name: a local directory, a hub name, ``random:<shape>``, or ``demo``."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from inlay.demo import MODEL_DIRECTORY
from inlay.errors import ModelError, ParameterError
from inlay.models.adapter import ModelSpec, check_config, describe
from inlay.models.bytes_tokenizer import bytes_tokenizer
from inlay.models.shapes import build_random, check_shape

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_DEMO_NOTE = "demo is a small model that answers questions from documents in front of it, and knows nothing else"


@dataclass(frozen=True)
class LoadedModel:
    """A stock transformers model with its tokenizer and what inlay knows of it.

    fingerprint: sha256 over configuration and a sample of every weight; part of every segment key.
    note: what a user should know of this model before reading its answers, or None.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    fingerprint: bytes
    note: str | None = None


def load_model(name: str, *, dtype: str = "auto", seed: int = 0) -> LoadedModel:
    """Load a model for the CPU.

    name: a directory, a hub name, ``random:<shape>``, or ``demo``.
    dtype: "float32", "bfloat16", or "auto": what the checkpoint says where that is one of the two, else bfloat16;
        random models are bfloat16, ``demo`` is float32.
    seed: of the random weights; checkpoints and ``demo`` ignore it.
    Raises ModelError with the reason.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ParameterError(f"dtype is '{dtype}'; use 'auto', 'float32' or 'bfloat16'")
    if name == "demo":
        bundled = _checkpoint(str(MODEL_DIRECTORY), "float32" if dtype == "auto" else dtype)
        return replace(bundled, name=name, note=_DEMO_NOTE)
    if name.startswith("random:"):
        shape = name.removeprefix("random:")
        return _random(name, shape, DTYPES.get(dtype, torch.bfloat16), seed, f"{name} has random weights")
    return _checkpoint(name, dtype)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights. name: as in ``load_model``. Raises ModelError."""
    if name == "demo":
        return _read_tokenizer(str(MODEL_DIRECTORY))
    if name.startswith("random:"):
        check_shape(name.removeprefix("random:"))
        return bytes_tokenizer()
    check_config(read_config(name))
    return _read_tokenizer(name)


def _random(name: str, shape: str, dtype: torch.dtype, seed: int, note: str) -> LoadedModel:
    tokenizer = bytes_tokenizer()
    model = build_random(shape, dtype, seed, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id)
    return LoadedModel(name, model, tokenizer, describe(model), fingerprint(model), note)


def _checkpoint(name: str, dtype: str) -> LoadedModel:
    config = read_config(name)
    check_config(config)
    tokenizer = _read_tokenizer(name)
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=_checkpoint_dtype(config, dtype),
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{name}: the weights cannot be loaded: {_first_line(error)}") from error
    model, report = read
    if lacking := sorted(report["missing_keys"]):  # transformers would fill them with noise
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ModelError(f"{name}: the weights lack {lacking[0]}{more}; give a complete checkpoint")
    model.eval()
    return LoadedModel(name, model, tokenizer, describe(model), fingerprint(model))


def read_config(name: str) -> PretrainedConfig:
    """The configuration of a local directory or of a hub name. Raises ModelError."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name}: the directory holds no config.json; give the folder of a Hugging Face checkpoint")
    if not path.is_dir() and (path.exists() or name.startswith(("/", "./", "../", "~"))):
        raise ModelError(f"{name}: no such directory; give the folder of a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        if path.is_dir():
            raise ModelError(f"{name}/config.json cannot be read: {_first_line(error)}") from error
        raise ModelError(
            f"{name} is neither a local directory nor a model that the hub would give "
            f"({_first_line(error)}); other names are 'demo' and 'random:<shape>'"
        ) from error


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{name}: the directory holds no tokenizer; add its tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{name}: the tokenizer cannot be loaded: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{name}: the tokenizer has no fast form; add a tokenizer.json")
    return tokenizer


def _checkpoint_dtype(config: PretrainedConfig, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.float32 if config.dtype in (torch.float32, "float32") else torch.bfloat16


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".")


def fingerprint(model: PreTrainedModel) -> bytes:
    """sha256 over the configuration and, of every weight, its name, shape, dtype and up to 1,024 spread values."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_attn_implementation"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].float().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.cpu().numpy().tobytes())
    return digest.digest()


def stop_ids(loaded: LoadedModel) -> frozenset[int]:
    """The token ids that end a text, from the generation configuration, the configuration and the tokenizer."""
    ids: set[int] = set()
    generation = getattr(loaded.model, "generation_config", None)
    for source in (generation, loaded.model.config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        if ids:
            break
    if loaded.tokenizer.eos_token_id is not None:
        ids.add(loaded.tokenizer.eos_token_id)
    return frozenset(ids)
