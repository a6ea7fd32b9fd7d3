"""Runs all rules over one laid-out schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from inlay.authoring.lint import structure_rules as order
from inlay.authoring.lint import structure_rules as parameters
from inlay.authoring.lint import structure_rules as unions
from inlay.authoring.lint import text_rules as repeats
from inlay.authoring.lint import text_rules as sizes
from inlay.authoring.lint.checked import Checked, Finding, Passed
from inlay.errors import ParameterError
from inlay.pml import Filled, Prompt, resolve
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.tokens import TextEncoder

RULES: tuple[Callable[[Checked], Iterable[Finding]], ...] = (
    sizes.small_modules,
    sizes.modules_without_text,
    sizes.beyond_the_context,
    unions.unions_of_one,
    unions.uneven_unions,
    unions.scaffolds_of_unions,
    parameters.long_arguments,
    parameters.wide_parameters,
    parameters.early_parameters,
    parameters.arguments_before_modules,
    order.late_text,
    order.hidden_scaffolds,
    repeats.text_without_a_role,
    repeats.variables_of_other_languages,
    repeats.repeated_text,
)


def lint_schema(
    layout: SchemaLayout,
    encoder: TextEncoder,
    prompts: Sequence[Prompt] = (),
    *,
    max_positions: int | None = None,
    small: int = 16,
) -> list[Finding]:
    """Return advice on a schema, in the order of places. A finding is an error only if its message says that a prompt
    fails.

    Args:
        layout: The schema, laid out with a model's tokenizer.
        encoder: The same tokenizer, for arguments.
        prompts: Prompts of this schema. The rules examine their arguments.
        max_positions: The model's context, or None if unknown.
        small: A module of fewer tokens is too small to pay.

    Raises:
        PMLError: A prompt does not fit the schema.
        ParameterError: ``small`` is negative.
    """
    if small < 0:
        raise ParameterError(
            f"small is {small}; it must be a number of tokens, or 0 for no advice on small modules",
            code="parameter.out_of_range",
        )
    passed = [one for prompt in prompts for one in _passed(layout, encoder, prompt)]
    checked = Checked(layout, passed, max_positions, small)
    return sorted((finding for rule in RULES for finding in rule(checked)), key=_position)


def _passed(layout: SchemaLayout, encoder: TextEncoder, prompt: Prompt) -> list[Passed]:
    items = resolve(layout.schema, prompt, moves=True).items
    return [
        Passed(item.param, len(encoder.text(item.text)), item.is_default, item.place)
        for item in items
        if isinstance(item, Filled)
    ]


def _position(finding: Finding) -> tuple[str, int, int, str]:
    return finding.place.source, finding.place.line or 0, finding.place.column or 0, finding.rule
