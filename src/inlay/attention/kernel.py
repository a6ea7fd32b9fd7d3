"""The compiled kernel (csrc/), or None if inlay was installed without a compiler."""

from __future__ import annotations

import importlib
from typing import Any

kernel: Any
try:
    kernel = importlib.import_module("inlay._kernel")
except ImportError:
    kernel = None
