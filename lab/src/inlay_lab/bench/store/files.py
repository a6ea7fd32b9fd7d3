"""Reading files with and without the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

_BLOCK = 1 << 20  # bytes of one read
_libc = ctypes.CDLL(None, use_errno=True)


def drop_pages(file: Path) -> bool:
    """Drop a file from the page cache. Returns False if the pages stay, as in a file system in memory."""
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)  # unwritten pages would stay
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)
    return cached_share(file) == 0


def cached_share(file: Path) -> float:
    """The share of a file's pages in the page cache, 0 to 1, from mincore(2). Raises OSError."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        begin = np.frombuffer(mapped, np.uint8)
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = np.zeros(pages, np.uint8)
        sizes = ctypes.c_void_p(begin.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(found.ctypes.data)
        failed = _libc.mincore(*sizes)
        del begin  # a mapping with a live view cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore fails for {file}")
    return float((found & 1).mean())


def read_through(file: Path) -> None:
    """Read a file from start to end, a MiB at a time, into the same memory."""
    buffer = bytearray(_BLOCK)
    opened = os.open(file, os.O_RDONLY)
    try:
        while os.readv(opened, [buffer]):
            pass
    finally:
        os.close(opened)


class LikePool:
    """Memory shaped like a pool's: for each KV tensor of a file, one with more slots.

    Its pages are written once, like those of a pool in use.
    """

    def __init__(self, file: Path, slots: int) -> None:
        self._memory: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if tensor.dim() == 4:  # (2, kv_heads, tokens, head_dim)
                both, heads, _, width = tensor.shape
                self._memory[name] = torch.ones((both, heads, slots, width), dtype=tensor.dtype)

    def load(self, file: Path) -> None:
        """Load a file's keys and values into the first slots with ``safetensors.torch.load_file``."""
        tensors = load_file(file)
        for name, memory in self._memory.items():
            memory[:, :, : tensors[name].shape[2]] = tensors[name]

    def holds(self, file: Path) -> bool:
        """True if the first slots equal the file's tensors."""
        tensors = load_file(file)
        return all(
            torch.equal(memory[:, :, : tensors[name].shape[2]], tensors[name]) for name, memory in self._memory.items()
        )
