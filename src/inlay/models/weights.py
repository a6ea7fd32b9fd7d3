"""The form of a model's weights: as in the checkpoint, packed for oneDNN, or quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from inlay.errors import ParameterError
from inlay.models.families import family_of
from inlay.models.family import body_name
from inlay.models.fingerprint import Checkpoint, Fingerprint
from inlay.models.formats.reading import Counter
from inlay.models.formats.stored import has_stored, restore
from inlay.models.linear import MakeLinear, note_paths
from inlay.models.quantize import QUANTIZATIONS, as_in_file, as_stored

WEIGHTS = ("packed", "stock")


@dataclass(frozen=True)
class WeightForm:
    """The form of weights. Raises ParameterError for an invalid one.

    Args:
        weights: "packed" joins and packs the linear layers. "stock" leaves the model unchanged.
        quantization: "int8", "int4", or None for the checkpoint's own precision: the model's dtype, or the bits that it
            was quantized to. It requires packed weights.
    """

    weights: str = "packed"
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ParameterError(
                f"weights is {self.weights!r}; use one of {', '.join(WEIGHTS)}", code="parameter.unknown_choice"
            )
        if self.quantization is None:
            return
        if self.quantization not in QUANTIZATIONS:
            known = ", ".join(QUANTIZATIONS)
            raise ParameterError(
                f"quantization is {self.quantization!r}; use one of {known}, or None", code="parameter.unknown_choice"
            )
        if self.weights == "stock":
            raise ParameterError(
                'quantization replaces the stock layers; leave out weights="stock"', code="parameter.conflict"
            )

    def maker(self, part: nn.Module) -> MakeLinear:
        """Return the function that makes the linear layers of a part of a model."""
        if self.quantization is None:
            return as_stored
        in_layers, of_head = QUANTIZATIONS[self.quantization]
        return of_head if isinstance(part, nn.Linear) else in_layers


#: An unchanged transformers model.
STOCK = WeightForm(weights="stock")


def parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that weights are loaded and packed in, with their paths, in the order of
    ``model.parameters()``.
    """
    body = body_name(model)
    for name, child in model.named_children():
        if name != body:
            yield name, child
            continue
        for inner, module in child.named_children():
            if isinstance(module, nn.ModuleList):
                yield from ((f"{name}.{inner}.{i}", layer) for i, layer in enumerate(module))
            else:
                yield f"{name}.{inner}", module


class Preparation:
    """Converts a model's weights part by part, and computes its fingerprint on the way.

    Weights are removed from the stock modules part by part, so a model is never in memory twice.

    Args:
        weights: The digest of the weights, if it is known.
    """

    def __init__(self, model: PreTrainedModel, form: WeightForm, weights: bytes | None = None) -> None:
        self._model = model
        self._form = form
        self._fingerprint = Fingerprint(model.config, weights)
        self._family = family_of(model.config)
        self._family.patch(model)
        kept = form.weights == "packed" and has_stored(model)
        self._rounding = form.quantization or ("as stored by group" if kept else None)

    def take(self, path: str, part: nn.Module) -> None:
        """Convert a part after its weights are loaded."""
        self._fingerprint.add(path, part)
        if self._form.weights == "packed" and self._form.quantization is None:
            part = as_in_file(part)
        note_paths(path, part)
        replacement = part
        if self._form.weights == "packed":
            replacement = self._family.fuse(path, part, self._form.maker(part))
            replacement.requires_grad_(False)  # it computes in place
        replacement = restore(replacement)  # stored layers that were not packed, such as routers of experts
        if replacement is not part:
            self._model.set_submodule(path, replacement)

    def weights(self) -> bytes:
        """Return the digest of the original weights."""
        return self._fingerprint.weights()

    def fingerprint(self) -> bytes:
        """Return the fingerprint of the original weights. It is the same for every form that does not round them."""
        return self._fingerprint.digest(self._rounding)


def prepare(
    model: PreTrainedModel,
    form: WeightForm,
    checkpoint: Checkpoint | None = None,
    reached: Callable[[float], None] | None = None,
) -> bytes:
    """Convert a whole model.

    Args:
        checkpoint: The files that it was read from. A known digest of them is not computed again.
        reached: Called after each part with the share of the weights that is done, from 0 to 1.

    Returns:
        The fingerprint of the model.
    """
    dtype = model.dtype
    known = None if checkpoint is None else checkpoint.recall(dtype)
    preparation = Preparation(model, form, known)
    pieces = [(path, part, _bytes(part)) for path, part in parts(model)]
    counter = Counter(str(model.config.name_or_path or type(model).__name__), sum(size for _, _, size in pieces))
    for path, part, size in pieces:
        preparation.take(path, part)
        share = counter.add(size)
        if reached is not None:
            reached(share)
    counter.close()
    if checkpoint is not None and known is None:
        checkpoint.remember(dtype, preparation.weights())
    return preparation.fingerprint()


def _bytes(part: nn.Module) -> int:
    """The bytes of the weights of a part, as stored."""
    return sum(tensor.nbytes for tensor in part.state_dict().values())
