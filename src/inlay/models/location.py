"""Where a model is: its name or folder as written, and one sentence each for files that are none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from inlay.errors import ModelError

_GGUF = b"GGUF"
_LFS = b"version https://git-lfs"
_LFS_MOST = 1024  # bytes of a pointer
_REMEDY = "give the folder of a Hugging Face checkpoint, or a GGUF file"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)


def model_name(model: str | os.PathLike[str]) -> str:
    """A model's name or folder as a text, with ``~`` as the home folder. Raises ModelError for an empty one."""
    name = os.path.expanduser(os.fsdecode(model))
    if not name.strip():
        raise ModelError(f"the name of the model is empty ({name!r}); {_REMEDY}, a hub name, random:<shape>, or demo")
    return name


def public_name(model: str) -> str:
    """Return what others may know of where a model comes from: of a folder or a file, its last name alone."""
    path = Path(model)
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.exists()
    return (path.resolve().name or "model") if is_path else model


def gguf_at(name: str) -> Path | None:
    """The GGUF file that a name stands for: it itself, or the only model of a folder; of a split one, the first part.

    None where the name is that of something else. Raises ModelError for a file that is not there, or one of several.
    """
    path = Path(name)
    if path.is_file():
        return path if _is_gguf(name) or _begins(path) == _GGUF else None
    if not path.is_dir():
        if _is_gguf(name) and hub_file(name) is None:
            raise ModelError(f"{name}: no such file; {_REMEDY}")
        return None
    if any(next(path.glob(f"*{suffix}"), None) for suffix in (".safetensors", ".bin")):
        return None
    models = [each for each in sorted(path.glob("*.gguf")) if _is_model(each)]
    if len(models) > 1:
        names = ", ".join(each.name for each in models)
        raise ModelError(f"{name}: holds {len(models)} models in GGUF; give one of them: {names}")
    return models[0] if models else None


def hub_file(name: str) -> tuple[str, str] | None:
    """The repository and the file of a name such as ``owner/name/file.gguf``; None for a name that is none."""
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
    """The names of all files of a GGUF model, of which one is given."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    stem, count = match["stem"], match["parts"]
    return [f"{stem}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of a GGUF model, in their order. Raises ModelError where it was split and one is lacking."""
    parts = tuple(path.with_name(name) for name in part_names(path.name))
    for part in parts if len(parts) > 1 else ():
        if not part.is_file():
            raise ModelError(f"{part}: is not there, and a model that was split into {len(parts)} files needs all")
    return parts


def check_location(name: str) -> None:
    """Raise ModelError, with the remedy, where a name is that of files that are no checkpoint, or not all of one."""
    path = Path(name)
    if not path.is_dir():
        check_folder(name)
        return
    if not (path / "config.json").is_file():
        _check_other_kinds(path)
        raise ModelError(f"{name}: the directory holds no config.json; {_REMEDY}")
    check_pointers(path)


def weight_files(place: str) -> tuple[Path, ...]:
    """The files that a model's weights lie in, of a folder or of a GGUF file."""
    path = Path(place)
    return gguf_parts(path) if path.is_file() else tuple(sorted(path.glob("*.safetensors")))


def check_weights(place: str) -> None:
    """Raise ModelError for a folder whose only weights are pickled: loading them can run any code."""
    if not weight_files(place) and (pickled := sorted(Path(place).glob("*.bin"))):
        raise ModelError(
            f"{pickled[0]}: is pickled, and pickles are not loaded, as they can run any code; convert it with "
            "transformers' save_pretrained, or give a folder with weights in safetensors"
        )


def check_pointers(path: Path) -> None:
    """Raise ModelError where Git has left pointers in a folder in place of large files."""
    for file in _pointers(path):
        raise ModelError(f"{file}: is a Git LFS pointer, not the file itself; run git lfs pull in {path}")


def check_folder(name: str) -> None:
    """Raise ModelError where a name is that of a file, of a folder that is not there, or ``demo`` misspelt.

    Names of the hub are none of these.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.is_file():
        raise ModelError(
            f"{name}: is a file; give the folder of a Hugging Face checkpoint, in which config.json stands"
        )
    if path.exists() or name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{name}: no such directory; {_REMEDY}")
    if get_close_matches(name.lower(), ["demo"], cutoff=0.75):  # the hub may take a minute to say that it has none
        raise ModelError(f"{name}: no such directory; did you mean demo? A model of the hub is OWNER/{name}")


def _check_other_kinds(path: Path) -> None:
    if (path / "adapter_config.json").is_file():
        base = None
        with suppress(OSError, ValueError):
            base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ModelError(
            f"{path}: is an adapter (LoRA){f' of {base}' if base else ''}, not a model; merge the two with PEFT's "
            "merge_and_unload(), save the result, and give its folder, or give that model and --adapter NAME="
            f"{path}"
        )


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _is_model(path: Path) -> bool:
    """Whether a GGUF file is a model by itself: no later part of one, and not what makes tokens of its images."""
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
