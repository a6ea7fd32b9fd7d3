"""The examples of docs/pml.md say what the page says of them."""

import re
from pathlib import Path

from inlay.pml import Prompt, Schema, limits, resolve
from tests.pml.helpers import shorthand

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_schema_and_its_prompt_in_xml_and_in_python(tmp_path: Path, monkeypatch) -> None:
    schema_text, prompt_text = blocks("xml")
    (tmp_path / "trip.xml").write_text(schema_text, encoding="utf-8")
    (tmp_path / "surf.xml").write_text(prompt_text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    first, second = blocks("python")
    exec(first, names)
    written = shorthand(resolve(Schema.from_file("trip.xml"), Prompt.from_file("surf.xml")))
    assert written == [
        *("<system", "You plan trips.\n", "</system"),
        *("<user", "Plan a trip of ", "[3 days]", ".\n", "Go to Miami.\n", "+Where can we surf?\n", "</user"),
    ]
    built = shorthand(resolve(names["schema"], names["prompt"]))
    assert [item.removesuffix("\n") for item in built] == [item.removesuffix("\n") for item in written]
    exec(second, names)
    assert len(resolve(names["schema"], names["two"]).items) == len(built) - 1 + 9


def test_the_limits() -> None:
    assert (limits.MAX_BYTES, limits.MAX_SOURCE_BYTES) == (16 * 2**20, 64 * 2**20)
    for limit in (limits.MAX_DEPTH, limits.MAX_PROBLEMS):
        assert f"| {limit}" in PAGE
    for limit in (limits.MAX_ELEMENTS, limits.MAX_ATTRIBUTES, limits.MAX_ATTRIBUTE_CHARACTERS, limits.MAX_PARAM_LENGTH):
        assert f"{limit:,}" in PAGE
