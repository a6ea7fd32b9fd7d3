"""docs/reference/settings.md is generated from the settings of engines and servers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inlay.config import EngineConfig
from inlay.server.settings import ServerSettings
from tests.settings_reference import PAGE, entries, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.settings_reference"


@pytest.mark.parametrize("settings", [EngineConfig, ServerSettings])
def test_every_setting_is_described(settings: type[Any]) -> None:
    described = [name for names in entries(settings) for name in names]
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(settings))


@pytest.mark.parametrize("settings", [EngineConfig, ServerSettings])
def test_settings_of_one_row_have_one_default(settings: type[Any]) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    assert all(len({defaults[name] for name in names}) == 1 for names in entries(settings))
