"""The names that transformers has for a model's cache: a keyword of the call, and a field of its result.

5.24 calls it ``cache`` in every model. Earlier releases have one name for keys and values, and others for states.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_keyword(model: nn.Module) -> str | None:
    """The keyword under which a model takes the cache of the text so far; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a model a cache. Raises TypeError if the model takes none."""
    keyword = cache_keyword(model)
    if keyword is None:
        raise TypeError(f"{type(model).__name__} takes no cache")
    return {keyword: cache}


def returned_cache(output: Any) -> Any:
    """The cache that a model's call has returned; None if it has returned none."""
    return next((cache for name in NAMES if (cache := getattr(output, name, None)) is not None), None)
