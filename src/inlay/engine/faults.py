"""Converts faults of passes, commands and listeners into errors for waiting callers."""

from __future__ import annotations

import torch

from inlay.errors import DeviceMemoryError


def fault_of(error: BaseException) -> Exception:
    """The error to report to a waiting caller.

    A BaseException, such as a panic in a library written in Rust, would end the caller's thread; it becomes a
    RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # frees the memory of the failed pass; no effect without a device
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
