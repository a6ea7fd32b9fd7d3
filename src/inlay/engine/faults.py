"""Faults of passes, of commands and of listeners, as those who wait for an answer are told of them."""

from __future__ import annotations

import torch

from inlay.errors import DeviceMemoryError


def fault_of(error: BaseException) -> Exception:
    """A fault as those who wait for an answer can be told of it.

    What is no Exception, such as a panic in a library written in Rust, would end whoever it is raised to.
    """
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # of what the pass held; nothing, where no device was used
        out = DeviceMemoryError(
            "the device had no memory left for this pass; set a smaller kv_memory or max_num_batched_tokens"
        )
        out.__cause__ = error
        return out
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told
