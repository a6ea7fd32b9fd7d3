"""What holds of a schema in whatever form it is written: unique names, scaffolds that fit, files that can be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.json_places import whereabouts
from inlay.pml.nodes import Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.problems import Problems, quote
from inlay.pml.scaffolds import Exclusions
from inlay.pml.sources import Folder, UnreadableError


@dataclass(frozen=True, slots=True)
class SchemaParts:
    """What a schema file holds."""

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """How problems call things, which depends on the form: a scaffold, and the method that reads a string."""

    scaffold: str
    method: str


class SchemaRules:
    """Checks one schema while it is read; what is wrong goes to ``problems``."""

    def __init__(self, folder: Folder | None, problems: Problems, words: Words) -> None:
        self._folder = folder
        self._problems = problems
        self._words = words
        self._modules: dict[str, Place] = {}

    def define(self, module: str, place: Place, name_place: Place) -> None:
        """A module of this name begins at ``place``."""
        first = self._modules.setdefault(module, place)
        if first is not place:
            twice = f"module {quote(module)} is defined twice, first {whereabouts(first)}"
            self._problems.add(name_place, f"{twice}; give this one another name")

    def check_params(self, module: str, params: Iterable[Param]) -> None:
        """No two parameters of a module have the same name."""
        seen = set()
        for param in params:
            if param.name and param.name in seen:
                twice = f"parameter {quote(param.name)} is defined twice in module {quote(module)}"
                self._problems.add(param.place, f"{twice}; give this one another name")
            seen.add(param.name)

    def file(self, src: str, place: Place) -> tuple[Text, ...]:
        """The content of a module that names a file."""
        if self._folder is None:
            remedy = f"give one with Schema.{self._words.method}(text, folder=…)"
            self._problems.add(place, f"src needs a folder, and a schema in a string has none; {remedy}")
            return ()
        try:
            text = self._folder.read(src)
        except UnreadableError as error:
            self._problems.add(place, str(error))
            return ()
        return (Text(text, Place(self._folder.name(src), 1, 1)),) if text else ()

    def check_scaffolds(
        self, scaffolds: Iterable[Scaffold], children: tuple[Text | Module | Union | Turn, ...]
    ) -> None:
        """Scaffolds name modules that a prompt can import together; all modules are defined by now."""
        exclusions = Exclusions(children)
        for scaffold in scaffolds:
            for name in scaffold.modules:
                if name not in self._modules:
                    self._problems.add(scaffold.place, self._unknown(name))
            names = f"{self._words.scaffold} names"
            if len(set(scaffold.modules)) == 1:
                alone = f"{names} {quote(scaffold.modules[0])} alone"
                self._problems.add(scaffold.place, f"{alone}; name at least two modules, or delete it")
            if pair := exclusions.between(scaffold.modules):
                both = f"{names} {quote(pair[0])} and {quote(pair[1])}, of which a union allows one"
                self._problems.add(scaffold.place, f"{both}; leave one of them out")

    def _unknown(self, name: str) -> str:
        near = self._problems.near(name, self._modules)
        remedy = f'did you mean "{near}"?' if near else "name modules of this schema"
        return f"{self._words.scaffold} names {quote(name)}, which is no module of this schema; {remedy}"
