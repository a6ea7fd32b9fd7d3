"""The fingerprint of a model's attention states, part of every segment key, and a cache of the digests behind it.

With the cache, only the first load of a checkpoint hashes every byte. A record is one JSON file in the user's cache
directory. It is valid while every file of the checkpoint has the same inode, size and times. A damaged record, or one
of another version, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from inlay.models.location import gguf_parts
from inlay.whole_file import replace_file

#: Version of the kernels and of the KV layout in a segment. Raised when a change alters computed results.
NUMERICS_VERSION = 2  # 2: int4 products round their inputs to 8 bits

#: Fields of a configuration that do not affect the computation.
_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation")
BLOCK = 1 << 20  # bytes that one thread hashes at a time


class Fingerprint:
    """sha256 over the configuration and over the name, shape, dtype and bytes of every weight.

    The bytes of a weight are hashed in blocks by PyTorch's number of threads, and the digests of the blocks are hashed
    in order. So the fingerprint does not depend on the threads. Weights may be added part by part, in any order, so a
    part can be packed or dropped before the next one is loaded.

    Args:
        weights: The digest of the weights, if it is known. Then no weights need to be added.
    """

    def __init__(self, config: PretrainedConfig, weights: bytes | None = None) -> None:
        settings = config.to_dict()
        for name in _VOLATILE:
            settings.pop(name, None)
        self._config = json.dumps(settings, sort_keys=True, default=str).encode()
        self._known = weights
        self._weights: dict[str, bytes] = {}
        self._hashed = WeakTensorKeyDictionary()  # a tied weight has two names and is hashed once

    def add(self, path: str, part: nn.Module) -> None:
        """Add the weights of the module at this path of the model."""
        if self._known is not None:
            return
        weights = part.state_dict(prefix=f"{path}." if path else "", keep_vars=True)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for name, weight in weights.items():
                if weight not in self._hashed:
                    self._hashed[weight] = _sha256(b"".join(threads.map(_sha256, blocks_of(weight))))
                described = f"{name} {tuple(weight.shape)} {weight.dtype}"
                self._weights[name] = _sha256(described.encode()) + self._hashed[weight]

    def weights(self) -> bytes:
        """Return the digest of all weights."""
        return self._known or _sha256(b"".join(weight for _, weight in sorted(self._weights.items())))

    def digest(self, quantization: str | None = None) -> bytes:
        """Return the fingerprint. quantization: how the weights are rounded, which makes it another model."""
        rounded = "" if quantization is None else f"quantization {quantization}"
        return _sha256(_sha256(self._config) + self.weights() + rounded.encode())


def numerics() -> str:
    """Return the versions of the code that computes keys and values: another part of every segment key."""
    return f"inlay {NUMERICS_VERSION}, transformers {transformers.__version__}, torch {torch.__version__}"


def fingerprint(model: PreTrainedModel) -> bytes:
    """Return the fingerprint of a stock model."""
    whole = Fingerprint(model.config)
    whole.add("", model)
    return whole.digest()


def blocks_of(weight: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a weight in blocks."""
    flat = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (block.numpy().data for block in flat.split(BLOCK))


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


logger = logging.getLogger(__name__)

VERSION = 2  # of the records, and of the input of the digest of the weights
_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")
_ADAPTER = "adapter_config.json"  # with this file, transformers would take the weights from another place
_MOST_FILES = 4096
_MOST_BYTES = 4 << 20
SETTLED_S = 2.0  # seconds; two changes within one tick of the file system's clock leave the same times


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint at a moment.

    Args:
        folder: Their folder, or the path of a GGUF file.
        files: (name, inode, size, mtime, ctime) of each file. Times are in nanoseconds.
    """

    folder: str
    files: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> Checkpoint | None:
        """Return the Checkpoint of a directory, a GGUF file or a hub name. None if its files do not determine the
        weights.
        """
        try:
            folder = _folder(name, config)
            files = [] if folder is None else _files(folder)
        except OSError:
            return None
        if not any(file[0].endswith(_SUFFIXES[1:]) for file in files) or any(file[0] == _ADAPTER for file in files):
            return None
        return cls(str(folder), tuple(files))

    def recall(self, dtype: torch.dtype) -> bytes | None:
        """Return the digest of the weights in this dtype, if an earlier load has recorded it."""
        path = self._path(dtype)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                record = json.loads(file.read(_MOST_BYTES))
            weights = bytes.fromhex(record["weights"])
            right = record == self._record(dtype, weights)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return weights if right else None

    def remember(self, dtype: torch.dtype, weights: bytes) -> None:
        """Record the digest of the weights for later loads. A failure is ignored.

        Nothing is recorded if the files have changed, or changed so recently that another change might not be noticed.
        """
        path = self._path(dtype)
        if path is None or not self._settled:
            return
        try:
            if tuple(_files(Path(self.folder))) != self.files:
                return
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, json.dumps(self._record(dtype, weights)).encode(), durable=False)
        except OSError as error:
            logger.debug("the fingerprint of %s is not kept: %s", self.folder, error)

    @property
    def _settled(self) -> bool:
        return max(max(file[3:]) for file in self.files) < (time.time() - SETTLED_S) * 1e9

    def _record(self, dtype: torch.dtype, weights: bytes) -> dict[str, Any]:
        record = {
            "version": VERSION,
            "folder": self.folder,
            "dtype": str(dtype),
            "transformers": transformers.__version__,  # it decides how files are converted
            "files": [list(file) for file in self.files],
            "weights": weights.hex(),
        }
        return {**record, "sha256": hashlib.sha256(json.dumps(record).encode()).hexdigest()}

    def _path(self, dtype: torch.dtype) -> Path | None:
        """The path of the record. There is one for each folder and dtype, so a changed checkpoint replaces its
        record.
        """
        root = cache_root()
        name = hashlib.sha256(json.dumps([VERSION, self.folder, str(dtype)]).encode()).hexdigest()[:32]
        return None if root is None else root / "fingerprints" / f"{name}.json"


def cache_root() -> Path | None:
    """Return inlay's cache directory: $INLAY_CACHE_ROOT, or ``inlay`` in $XDG_CACHE_HOME or ~/.cache.

    None if there is no home directory.
    """
    own, shared = os.environ.get("INLAY_CACHE_ROOT"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own)
    if os.path.isabs(shared):  # the XDG specification says to ignore relative paths
        return Path(shared) / "inlay"
    try:
        return Path.home() / ".cache" / "inlay"
    except RuntimeError:
        return None


def _folder(name: str, config: PretrainedConfig) -> Path | None:
    """The folder of a model's files. For a hub name this is in the hub's cache."""
    if Path(name).exists():
        return Path(name).resolve()
    commit = getattr(config, "_commit_hash", None)
    found = cached_file(name, "config.json", revision=commit, local_files_only=True) if commit else None
    return Path(found).parent if found else None


def _files(folder: Path) -> list[tuple[str, int, int, int, int]]:
    if folder.is_file():
        paths, folder = list(gguf_parts(folder)), folder.parent
    else:
        paths = list(islice(folder.rglob("*"), _MOST_FILES + 1))
    if len(paths) > _MOST_FILES:
        return []
    found = []
    for path in sorted(paths):
        if path.suffix in _SUFFIXES:
            stat = path.stat()
            name = path.relative_to(folder).as_posix()
            found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return found
