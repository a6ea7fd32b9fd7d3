"""The location of a model: its name or folder, and error messages for files that are not a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from inlay.errors import ModelError

_GGUF = b"GGUF"
_LFS = b"version https://git-lfs"
_LFS_MOST = 1024  # largest size of a pointer in bytes
_REMEDY = "give the folder of a Hugging Face checkpoint, or a GGUF file"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)


def model_name(model: str | os.PathLike[str]) -> str:
    """Return a model's name or folder as a str, with ``~`` expanded. Raises ModelError for an empty one."""
    name = os.path.expanduser(os.fsdecode(model))
    if not name.strip():
        raise ModelError(
            f"the name of the model is empty ({name!r}); {_REMEDY}, a hub name, random:<shape>, or demo",
            code="model.empty_name",
        )
    return name


def public_name(model: str) -> str:
    """Return the name that clients may know: the last name of a path, and any other name as it is."""
    path = Path(model_name(model))
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.exists()
    return (path.resolve().name or "model") if is_path else model


def served_names(model: str, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names that requests to a server or in a batch may use for the model. Answers carry the first one.

    Args:
        model: The name or folder of the model.
        given: The names of ``--served-model-name``, which replace the model's own name. None or empty: none given.
    """
    return tuple(given or (public_name(model),))


def gguf_at(name: str) -> Path | None:
    """Return the GGUF file that a name stands for: the file itself, or the only model in a folder. For a split model
    this is its first file. None if the name stands for something else.

    Raises ModelError if the file is missing, or a folder has several models.
    """
    path = Path(name)
    if path.is_file():
        return path if _is_gguf(name) or _begins(path) == _GGUF else None
    if not path.is_dir():
        if _is_gguf(name) and hub_file(name) is None:
            raise ModelError(f"{name}: no such file; {_REMEDY}", code="model.not_found")
        return None
    if any(next(path.glob(f"*{suffix}"), None) for suffix in (".safetensors", ".bin")):
        return None
    models = [each for each in sorted(path.glob("*.gguf")) if _is_model(each)]
    if len(models) > 1:
        names = ", ".join(each.name for each in models)
        raise ModelError(
            f"{name}: holds {len(models)} models in GGUF; give one of them: {names}", code="model.ambiguous_file"
        )
    return models[0] if models else None


def hub_file(name: str) -> tuple[str, str] | None:
    """Split a name such as ``owner/name/file.gguf`` into repository and file. None for other names."""
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if (
        not (owner and repository and file)
        or owner.startswith((".", "~"))
        or not _is_gguf(file)
        or Path(owner).is_dir()
    ):
        return None
    return f"{owner}/{repository}", file


def part_names(file: str) -> list[str]:
    """Return the names of all files of a GGUF model, given one of them."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    stem, count = match["stem"], match["parts"]
    return [f"{stem}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a GGUF model, in order. Raises ModelError if a part of a split one is missing."""
    parts = tuple(path.with_name(name) for name in part_names(path.name))
    for part in parts if len(parts) > 1 else ():
        if not part.is_file():
            raise ModelError(
                f"{part}: is not there, and a model that was split into {len(parts)} files needs all",
                code="model.missing_weights",
            )
    return parts


def check_location(name: str) -> None:
    """Raise ModelError, with the remedy, if a name is that of files that are not a complete checkpoint."""
    path = Path(name)
    if not path.is_dir():
        check_folder(name)
        return
    if not (path / "config.json").is_file():
        _check_other_kinds(path)
        raise ModelError(f"{name}: the directory holds no config.json; {_REMEDY}", code="model.no_config")
    check_pointers(path)


def check_place(name: str | os.PathLike[str]) -> None:
    """Raise ModelError if no files of a model are where a name points to.

    It loads no libraries, so a command can call it first. Names on the hub, ``random:<shape>`` and ``demo`` pass.
    """
    name = model_name(name)
    if name == "demo" or name.startswith("random:") or hub_file(name) is not None:
        return
    if gguf_at(name) is None:
        check_location(name)


def weight_files(place: str) -> tuple[Path, ...]:
    """Return the files of a model's weights, for a folder or a GGUF file."""
    path = Path(place)
    return gguf_parts(path) if path.is_file() else tuple(sorted(path.glob("*.safetensors")))


def check_weights(place: str) -> None:
    """Raise ModelError if the only weights of a folder are pickled. Loading them can run any code."""
    if not weight_files(place) and (pickled := sorted(Path(place).glob("*.bin"))):
        raise ModelError(
            f"{pickled[0]}: is pickled, and pickles are not loaded, as they can run any code; convert it with "
            "transformers' save_pretrained, or give a folder with weights in safetensors",
            code="model.pickled_weights",
        )


def check_pointers(path: Path) -> None:
    """Raise ModelError if Git has left LFS pointers in place of large files."""
    for file in _pointers(path):
        raise ModelError(
            f"{file}: is a Git LFS pointer, not the file itself; run git lfs pull in {path}", code="model.file_pointer"
        )


def check_folder(name: str) -> None:
    """Raise ModelError if a name is that of a file, of a missing folder, or a misspelt ``demo``.

    Names on the hub pass.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.is_file():
        raise ModelError(
            f"{name}: is a file; give the folder of a Hugging Face checkpoint, in which config.json stands",
            code="model.not_a_folder",
        )
    if path.exists() or name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{name}: no such directory; {_REMEDY}", code="model.not_found")
    if get_close_matches(name.lower(), ["demo"], cutoff=0.75):  # the hub may take a minute to report a missing name
        raise ModelError(
            f"{name}: no such directory; did you mean demo? A model of the hub is OWNER/{name}", code="model.not_found"
        )


def _check_other_kinds(path: Path) -> None:
    if (path / "adapter_config.json").is_file():
        base = None
        with suppress(OSError, ValueError):
            base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ModelError(
            f"{path}: is an adapter (LoRA){f' of {base}' if base else ''}, not a model; merge the two with PEFT's "
            "merge_and_unload(), save the result, and give its folder, or give that model and --adapter NAME="
            f"{path}",
            code="model.is_adapter",
        )


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _is_model(path: Path) -> bool:
    """Return True if a GGUF file is a model by itself, not a later part of one or an image projector."""
    match = _PART.fullmatch(path.name)
    return not path.name.startswith("mmproj") and (match is None or int(match["part"]) == 1)


def _pointers(path: Path) -> Iterator[Path]:
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        wanted = file.suffix in (".safetensors", ".bin", ".json", ".model")
        if wanted and file.is_file() and file.stat().st_size <= _LFS_MOST and _begins(file, len(_LFS)) == _LFS:
            yield file


def _begins(path: Path, count: int = 4) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(count)
    return b""
