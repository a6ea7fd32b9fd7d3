"""Devices: choosing one, moving a model to it, and its free memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from inlay.errors import CapacityError, ParameterError
from inlay.models.spec import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda", "cuda:1", or "auto" (a GPU if PyTorch finds one, else the CPU).

    Raises ParameterError if there is no such device.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "was built without CUDA"
        raise ParameterError(
            f"device is '{name}', and the PyTorch of this install {built}; use 'cpu' or 'auto'",
            code="parameter.unavailable_device",
        )
    device = torch.device("cuda" if name == "auto" else name)
    number, there = device.index or 0, torch.cuda.device_count()
    if number >= there:
        last = f"cuda:{there - 1}"
        raise ParameterError(
            f"device is '{name}', and the last GPU here is '{last}'; use that, or 'auto'",
            code="parameter.unavailable_device",
        )
    return torch.device("cuda", number)


def check_form(device: torch.device, weights: str | None, quantization: str | None) -> str:
    """Return the ``WeightForm.weights`` for a device: ``weights``, or the device's default if it is None.

    Raises ParameterError if the device does not support the form.
    """
    if device.type == "cpu":
        return "packed" if weights is None else weights
    for name, value in (("weights", weights if weights == "packed" else None), ("quantization", quantization)):
        if value is not None:
            raise ParameterError(
                f"{name} '{value}' is for the CPU, and the device is {device}; leave it out, or use device 'cpu'",
                code="parameter.conflict",
            )
    return "stock" if weights is None else weights


def put_on(model: PreTrainedModel, name: str, device: torch.device) -> None:
    """Move a model's weights to a device. Raises CapacityError, with the model's ``name``, if they do not fit."""
    if model.device == device:
        return
    try:
        model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        raise CapacityError(
            f"the weights of {name} take {size / 2**30:.1f} GiB in {dtype_name(model.dtype)}, which {device} has not "
            "free; use a smaller model, or device 'cpu'",
            code="model.too_large",
        ) from error


def check_placed(model: PreTrainedModel, name: str) -> None:
    """Raise ParameterError if a model that the caller has loaded is not on the named device."""
    here = model.device
    if name != "auto" and find_device(name) != here:
        raise ParameterError(
            f"device is '{name}', and the model that was given is on {here}; load it with load_model(…, "
            f"device='{name}'), or leave device out",
            code="parameter.conflict",
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which kernels are launched on this device."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def total_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory, used or not. For the CPU this is the memory of the machine."""
    if device.type == "cpu":
        return psutil.virtual_memory().total
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device. None for the CPU, which uses host memory."""
    return None if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device asynchronously. On the CPU the result shares the array's memory."""
    there = torch.from_numpy(array)
    if device.type == "cuda":
        there = there.pin_memory()  # this copies at once, so the caller may change the array
    return there.to(device, non_blocking=True)


class Download:
    """An asynchronous copy of a tensor from a device to the host.

    Args:
        numbers: The tensor on the device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._host = numbers.cpu()
            return
        with on_device(numbers.device):
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy and return the numbers."""
        if self._there is not None:
            self._there.synchronize()
        found: npt.NDArray[Any] = self._host.numpy()
        return found
