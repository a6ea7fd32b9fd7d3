"""Mixers of a stock model that keep their states in inlay's slots.

A mixer's ``forward`` stays the code of transformers. Only the global names of its convolution and its scan mean other
functions. We make a function from the same code object with other globals, and put it in a subclass.

The alternative is a ``forward`` of our own for each mixer. There are twelve of them, with about 100 lines each. Most of
these lines are projections, norms and reshapes, which differ in every family and change between releases. The names of
the operations are the same in all families. If a release renames one, loading fails with the missing name, and the
probe at load compares the rebound model with the stock one.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

from torch import nn

from inlay.errors import ModelError
from inlay.models.interface import carried_pass
from inlay.models.mixers.operations import SCANS, convolve, refuse_step

_CONVOLUTION, _STEP = "causal_conv1d_fn", "causal_conv1d_update"


def names_of(mixer: type[nn.Module]) -> frozenset[str]:
    """Return the global names that a class looks up in its ``forward``."""
    code = getattr(inspect.unwrap(mixer.forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def is_mixer(module: nn.Module) -> bool:
    """Return True for a layer with a convolution over the text."""
    return isinstance(module, _Rebound) or _CONVOLUTION in names_of(type(module))


def rebind(model: nn.Module) -> list[str]:
    """Give all mixers of a model our operations. Returns their paths; does nothing to mixers that have them.

    Raises:
        ModelError: a mixer uses other operations than those that we replace.
    """
    paths = []
    for path, module in list(model.named_modules()):
        if isinstance(module, _Rebound):
            paths.append(module.inlay_path)
        elif is_mixer(module):
            stock = type(module)
            made = type(f"Inlay{stock.__name__}", (_Rebound, stock), {"inlay_forward": _rebound(stock)})
            module.__class__ = made
            module.inlay_path = path
            paths.append(path)
    return paths


class _Rebound(nn.Module):
    """Base of the rebound mixers. Without a pass they are the stock ones."""

    inlay_path: str
    inlay_forward: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = carried_pass()
        if running is None or running.states is None:
            return super().forward(*args, **kwargs)
        running.states.enter(self.inlay_path)
        return self.inlay_forward(*args, **kwargs)


def _rebound(mixer: type[nn.Module]) -> FunctionType:
    """Return a mixer's ``forward`` with our operations."""
    used, home = names_of(mixer), sys.modules[mixer.__module__]
    replaced: dict[str, Any] = {_CONVOLUTION: convolve, _STEP: refuse_step}
    for name, (make, step) in SCANS.items():
        if name in used:
            replaced |= {name: make(home), step: refuse_step}
    unknown = sorted(name for name in used - replaced.keys() if name.endswith(_ENDS) and hasattr(home, name))
    if unknown or not replaced.keys() <= used:
        missing = unknown or sorted(replaced.keys() - used)
        raise ModelError(
            f"{mixer.__name__} of this transformers release computes its states in another way than inlay knows "
            f"({', '.join(missing)}); install the transformers release that inlay names, or report this model",
            code="model.not_servable",
        )
    stock = inspect.unwrap(mixer.forward)
    made = FunctionType(
        stock.__code__, {**stock.__globals__, **replaced}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    made.__kwdefaults__ = stock.__kwdefaults__
    return made


#: Ends of the names of functions that carry a state. A mixer with another one cannot be rebound.
_ENDS = ("_scan", "_rule", "_attention", "_state_update", "_conv1d_fn", "_conv1d_update")
