"""Every error of the project survives pickle and copy: process pools and Ray send errors that way."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import inlay
from inlay import Schema
from inlay.api.failures import BodyError
from inlay.batch.requests import LineError
from inlay.cli.cache_url import _StatusError
from inlay.errors import InlayError, PMLError, StructureError
from inlay.kv.tiers.tier import Miss, TierMissError
from inlay.strict_json import Fault, JSONError


def examples() -> Iterator[Exception]:
    with pytest.raises(PMLError) as caught:
        Schema.from_string('<schema name="s"><module>b</module></schema>')
    yield caught.value
    yield BodyError("no", param="p", code="c", status=429, retry_after_s=2.0)
    yield LineError("no", "a")
    yield StructureError("no", "reason", ("properties", 0))
    yield TierMissError(Miss.LATE, "too late")
    yield JSONError(Fault.TWICE, "key", "a\nb", 2, bound=3)
    yield _StatusError("gone", 410)
    failed = InlayError("no")
    failed.outputs = (None, "text")
    yield failed


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_keeps_its_message_and_fields(error: Exception, again):
    made = again(error)
    assert type(made) is type(error)
    assert str(made) == str(error)
    assert made.__dict__ == error.__dict__


def test_every_error_with_a_constructor_of_its_own_is_an_example():
    for module in pkgutil.walk_packages(inlay.__path__, "inlay."):
        if not module.name.startswith(("inlay.cluster.ray", "inlay.attention.triton", "inlay.__main__")):
            importlib.import_module(module.name)
    named = {type(error) for error in examples()}
    left = [InlayError]
    own = set()
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if "__init__" in vars(kind):
            own.add(kind)
    assert own <= named
