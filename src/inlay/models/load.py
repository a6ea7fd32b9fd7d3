"""Loads models by name: a local directory, a GGUF file, a hub name, ``random:<shape>``, or the bundled ``demo``."""

from __future__ import annotations

import copy
import logging
import os
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

from inlay.errors import ModelError, ParameterError
from inlay.models.device import check_form, check_placed, find_device, put_on
from inlay.models.families import check_config, describe, family_of
from inlay.models.family import note_of
from inlay.models.fill import check_complete
from inlay.models.fingerprint import Checkpoint
from inlay.models.fingerprint import fingerprint as fingerprint
from inlay.models.formats.gguf_file import GGUFFile
from inlay.models.formats.mapped import mapped_files
from inlay.models.formats.reading import ReadAhead, pieces_of, quiet_transformers, tensor_names
from inlay.models.formats.reading import weights_progress as weights_progress
from inlay.models.location import (
    check_folder,
    check_location,
    check_pointers,
    check_weights,
    gguf_at,
    gguf_parts,
    hub_file,
    model_name,
    weight_files,
)
from inlay.models.multimodal import (
    NAMES,
    TextWeights,
    is_multimodal,
    processor_template,
    text_config,
)
from inlay.models.pull import hub_reason, pull, waiting
from inlay.models.quantized import read_quantized, settings_of
from inlay.models.random import build_random, bytes_tokenizer, check_shape
from inlay.models.shapes import MODEL_DIRECTORY as MODEL_DIRECTORY
from inlay.models.spec import ModelSpec, dtype_name
from inlay.models.unshared import check_unquantized
from inlay.models.weights import STOCK, WeightForm, prepare
from inlay.wording import first_line

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_DEMO_NOTE = "demo is a small model that answers questions from documents in front of it, and knows nothing else"


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model with its tokenizer and inlay's description of it.

    Args:
        fingerprint: sha256 over the configuration and every byte of every weight; part of every segment key.
        note: a hint for users about this model's answers, or None.
        form: the storage of the weights.
        text_model: a sentence about the text model, if the checkpoint is multimodal. None: it is not.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    fingerprint: bytes
    note: str | None = None
    form: WeightForm = STOCK
    text_model: str | None = None


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    seed: int = 0,
    weights: str | None = None,
    quantization: str | None = None,
    device: str = "auto",
) -> LoadedModel:
    """Load a model.

    Args:
        name: a directory, a GGUF file, a hub name, ``random:<shape>``, or ``demo``.
        dtype: "float32", "bfloat16", or "auto". "auto" takes the dtype of the checkpoint's configuration, or of its
            weights if that has none. If that dtype is neither of the two, it is bfloat16. Random models are bfloat16,
            ``demo`` is float32.
        seed: of the random weights; checkpoints and ``demo`` ignore it.
        weights: "packed" for speed on the CPU, or "stock" for transformers' own modules. None for "packed" on the CPU
            and "stock" on a GPU.
        quantization: "int8" or "int4" store the linear layers' weights in so many bits, on the CPU. None keeps the
            model's dtype, or the checkpoint's bits.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one.

    Raises:
        ModelError: with the reason, if the model cannot be loaded.
        ParameterError: for a wrong argument.
        CapacityError: if the device has too little memory.
    """
    name, where = model_name(name), find_device(device)
    form = WeightForm(check_form(where, weights, quantization), quantization)
    loaded = _load(name, dtype, seed, form)
    put_on(loaded.model, name, where)
    return loaded


def _load(name: str, dtype: str, seed: int, form: WeightForm) -> LoadedModel:
    if dtype != "auto" and dtype not in DTYPES:
        raise ParameterError(
            f"dtype is '{dtype}'; use 'auto', 'float32' or 'bfloat16'", code="parameter.unknown_choice"
        )
    if name == "demo":
        bundled = _checkpoint(str(MODEL_DIRECTORY), "float32" if dtype == "auto" else dtype, form, keep=False)
        return replace(bundled, name=name, note=_DEMO_NOTE)
    if name.startswith("random:"):
        return _random(name, DTYPES.get(dtype, torch.bfloat16), seed, form)
    return _checkpoint(name, dtype, form)


GivenModel = str | os.PathLike[str] | LoadedModel | PreTrainedModel


def as_loaded(
    model: GivenModel,
    dtype: str,
    seed: int,
    weights: str | None,
    quantization: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
) -> LoadedModel:
    """Load a model given by name, or check a loaded one. Arguments and errors: see ``load_model``.

    Args:
        tokenizer: only for a transformers model.
        device: "auto" leaves a loaded model where it is.
    """
    if tokenizer is not None and not isinstance(model, PreTrainedModel):
        raise ParameterError(
            "tokenizer is for a model of transformers that is loaded; this one brings its own",
            code="parameter.conflict",
        )
    if isinstance(model, str | os.PathLike):
        return load_model(model, dtype=dtype, seed=seed, weights=weights, quantization=quantization, device=device)
    if not isinstance(model, LoadedModel | PreTrainedModel):
        merged = ", merged with merge_and_unload()" if type(model).__name__.startswith("Peft") else ""
        raise ParameterError(
            f"model is a {type(model).__name__}; give a name, a folder, or a model of transformers{merged}, with its "
            "tokenizer",
            code="parameter.wrong_type",
        )
    for name, value in (("weights", weights), ("quantization", quantization)):
        if value is not None:
            raise ParameterError(
                f"{name} is for a model given by name; this one is loaded: give it to load_model",
                code="parameter.conflict",
            )
    found = model if isinstance(model, LoadedModel) else _from_transformers(model, dtype, tokenizer)
    check_placed(found.model, device)
    return found


def _from_transformers(model: PreTrainedModel, dtype: str, tokenizer: PreTrainedTokenizerBase | None) -> LoadedModel:
    """Describe a model that the caller has loaded. Its own calls compute as before. Raises ParameterError."""
    if tokenizer is None:
        raise ParameterError(
            "a model of transformers needs its tokenizer: write "
            "LLM(model, tokenizer=AutoTokenizer.from_pretrained(…)), or give the model's name or folder instead",
            code="model.no_tokenizer",
        )
    wrong = {
        f"its weights are {dtype_name(model.dtype)}; load it with dtype=torch.bfloat16 or torch.float32": (
            model.dtype not in DTYPES.values()
        ),
        f"dtype is '{dtype}' and its weights are {dtype_name(model.dtype)}; convert it, or leave dtype out": (
            dtype != "auto" and DTYPES.get(dtype) is not model.dtype
        ),
        f"it is on the device {model.device}; move it with model.to('cpu')": model.device.type not in ("cpu", "cuda"),
        "it is being trained; call model.eval() first": model.training,
        "its tokenizer has no fast form; save it with a tokenizer.json": not getattr(tokenizer, "is_fast", False),
    }
    for sentence, so in wrong.items():
        if so:
            raise ParameterError(f"the model of transformers cannot be served: {sentence}", code="model.not_servable")
    name, spec = str(model.config.name_or_path or type(model).__name__), describe(model)
    family_of(model.config).patch(model)
    return LoadedModel(name, model, tokenizer, spec, fingerprint(model))


def adjusted(loaded: LoadedModel, chat_template: str | None, max_model_len: int | None) -> LoadedModel:
    """Return the model with another chat template or a shorter context. Raises ParameterError."""
    if chat_template is not None:
        tokenizer = copy.copy(loaded.tokenizer)  # the caller's own tokenizer must not change
        tokenizer.chat_template = chat_template
        loaded = replace(loaded, tokenizer=tokenizer)
    longest = loaded.spec.max_positions
    if max_model_len is not None and max_model_len > longest:
        raise ParameterError(
            f"max_model_len is {max_model_len}, and the model has {longest} positions; give at most that",
            code="parameter.out_of_range",
        )
    if max_model_len is not None and max_model_len < longest:
        loaded = replace(loaded, spec=replace(loaded.spec, max_positions=max_model_len, limit=None))
    return loaded


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without weights. ``name`` as in ``load_model``. Raises ModelError."""
    name = model_name(name)
    if name == "demo":
        return _read_tokenizer(str(MODEL_DIRECTORY))
    if name.startswith("random:"):
        check_shape(name.removeprefix("random:"))
        return bytes_tokenizer()
    gguf = _gguf(name)
    return _read_tokenizer(name) if gguf is None else _gguf_tokenizer(gguf)


def check_model(name: str | os.PathLike[str]) -> PretrainedConfig:
    """Check a model as far as ``load_model`` does before it reads weights.

    Checks the tensors and the tokenizer of a GGUF file. Checks the weight files and the tokenizer of a folder with
    weights. Checks only the configuration of a model on the hub.

    Args:
        name: a directory, a GGUF file, or a hub name.

    Returns:
        The configuration; of a multimodal checkpoint, that of its text model.

    Raises:
        ModelError: if ``load_model`` would refuse the model.
    """
    name = model_name(name)
    gguf, config, _ = _described(name)
    if gguf is not None:
        gguf.check(config)
        _gguf_tokenizer(gguf)
    elif Path(name).is_dir():
        check_weights(name)
        if weight_files(name):
            _read_tokenizer(name)
    return config


def _described(name: str) -> tuple[GGUFFile | None, PretrainedConfig, str | None]:
    """Return the GGUF file of a name, or None, the configuration, and the type of a multimodal checkpoint, or None.

    Raises ModelError for an unsupported model.
    """
    gguf = _gguf(name)
    whole = whole_config(name) if gguf is None else gguf.config()
    config = text_config(whole)
    check_config(config)
    return gguf, config, whole.model_type if is_multimodal(whole) else None


def _random(name: str, dtype: torch.dtype, seed: int, form: WeightForm) -> LoadedModel:
    tokenizer = bytes_tokenizer()
    shape, bos, eos = name.removeprefix("random:"), tokenizer.bos_token_id, tokenizer.eos_token_id
    model, fingerprint = build_random(shape, dtype, seed, bos=bos, eos=eos, form=form)
    spec = describe(model)
    check_unquantized(spec, form.quantization)
    return LoadedModel(name, model, tokenizer, spec, fingerprint, f"{name} has random weights", form)


def _checkpoint(name: str, dtype: str, form: WeightForm, *, keep: bool = True) -> LoadedModel:
    """Load a checkpoint. ``keep`` caches the digest of the weights in the user's cache directory."""
    gguf, config, multimodal = _described(name)
    place = name if gguf is None else gguf.name
    if not Path(place).exists():
        place = str(pull(name))
    if gguf is None:
        check_weights(place)
    tokenizer = _read_tokenizer(place) if gguf is None else _gguf_tokenizer(gguf)
    files = Checkpoint.of(place, config) if keep else None
    text = None if multimodal is None else TextWeights(multimodal, config)
    with ReadAhead(pieces_of(weight_files(place), None if text is None else text.__contains__)) as ahead:
        if gguf is not None:
            model = _read_gguf(gguf, config, dtype)
        elif text is None:
            model = _read_weights(place, config, dtype)
        else:
            with text.reading():
                model = _read_weights(place, config, dtype, NAMES)
        if files is not None and files != Checkpoint.of(place, config):
            files = None  # changed while loading, so the digest is not cached
        model.eval()
        spec = describe(model)
        notes = [spec.unshared or spec.whole or note_of(config)]
        if text is not None:
            notes.insert(0, text.note(tensor_names(weight_files(place))))
        check_unquantized(spec, form.quantization)
        with mapped_files(weight_files(place)):
            fingerprint = prepare(model, form, files, ahead.reached)
    note = "; ".join(filter(None, notes)) or None
    return LoadedModel(name, model, tokenizer, spec, fingerprint, note, form, None if text is None else text.sentence)


def _read_weights(
    name: str, config: PretrainedConfig, dtype: str, names: dict[str, str] | None = None
) -> PreTrainedModel:
    """Load the stock model in a supported dtype.

    Args:
        names: patterns of the weights' names in the files, and their replacements. None: they are the model's.
    """
    wanted: Any = DTYPES.get(dtype, config.dtype)
    if settings_of(config) is not None:
        with quiet_transformers():
            return read_quantized(name, Path(name), config, _computed(name, wanted or torch.bfloat16), names)
    if wanted is None:  # without a dtype in the configuration, transformers looks at the weights
        model = _read_model(name, config, "auto", names)
        if model.dtype in DTYPES.values():
            return model
        wanted = model.dtype
    return _read_model(name, config, _computed(name, wanted), names)


def _computed(name: str, wanted: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in for weights of this dtype."""
    if wanted in DTYPES.values():
        return wanted
    remedy = "dtype 'float32' keeps every bit of them"
    logger.warning("%s: its weights are %s and are loaded as bfloat16; %s", name, dtype_name(wanted), remedy)
    return torch.bfloat16


def _gguf(name: str) -> GGUFFile | None:
    """Return the GGUF file of a name, or None. Raises ModelError."""
    path = pull(name) if not Path(name).exists() and hub_file(name) else gguf_at(name)
    return None if path is None else GGUFFile(gguf_parts(path))


def _read_gguf(file: GGUFFile, config: PretrainedConfig, dtype: str) -> PreTrainedModel:
    with quiet_transformers():
        return file.model(config, DTYPES.get(dtype) or _computed(file.name, file.dtype()))


def _gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    try:
        return file.tokenizer()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{file.name}: the tokenizer cannot be loaded: {first_line(error)}", code="model.unreadable_tokenizer"
        ) from error


def _read_model(
    name: str, config: PretrainedConfig, dtype: torch.dtype | str, names: dict[str, str] | None
) -> PreTrainedModel:
    try:
        with quiet_transformers():
            read: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                key_mapping=names,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            f"{name}: the weights cannot be loaded: {first_line(error)}", code="model.unreadable_weights"
        ) from error
    model: PreTrainedModel
    model, report = read
    check_complete(name, report)
    return model


def read_config(name: str) -> PretrainedConfig:
    """Return the configuration of a local directory, a GGUF file, or a hub name; of a multimodal one, its text model's.

    Raises ModelError.
    """
    return text_config(whole_config(name))


def whole_config(name: str) -> PretrainedConfig:
    """Return the configuration of a local directory, a GGUF file, or a hub name, as published. Raises ModelError."""
    name = model_name(name)
    if (gguf := _gguf(name)) is not None:
        return gguf.config()
    check_location(name)
    path = Path(name)
    try:
        with waiting(name):
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        if path.is_dir():
            raise ModelError(
                f"{name}/config.json cannot be read: {first_line(error)}", code="model.unreadable_config"
            ) from error
        said = hub_reason(error)
        why = f": it {said}" if said else f" ({first_line(error)}); other names are 'demo' and 'random:<shape>'"
        raise ModelError(
            f"{name} is neither a local directory nor a model that the hub would give{why}", code="model.not_found"
        ) from error


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    check_folder(name)
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{name}: the directory holds no tokenizer; add its tokenizer.json", code="model.no_tokenizer")
    check_pointers(Path(name))
    try:
        with waiting(name):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        said = None if Path(name).is_dir() else hub_reason(error)
        why = f"{name} {said}" if said else f"{name}: the tokenizer cannot be loaded: {first_line(error)}"
        raise ModelError(why, code="model.unreadable_tokenizer") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{name}: the tokenizer has no fast form; add a tokenizer.json", code="model.no_fast_tokenizer"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor_template(Path(name))
    return tokenizer


def stop_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the token ids that end a text, from the generation configuration, the configuration and the tokenizer.

    Ids beyond the vocabulary are left out, because the model cannot generate them.
    """
    ids: set[int] = set()
    generation = getattr(loaded.model, "generation_config", None)
    for source in (generation, loaded.model.config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        if ids:
            break
    if loaded.tokenizer.eos_token_id is not None:
        ids.add(loaded.tokenizer.eos_token_id)
    return frozenset(token for token in ids if 0 <= token < loaded.spec.vocab_size)
