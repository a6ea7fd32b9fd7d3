"""Advice on schemas: findings about memory, positions and reuse, each with a remedy."""

from inlay.authoring.lint.checked import Finding
from inlay.authoring.lint.lint import RULES, lint_schema

__all__ = ["RULES", "Finding", "lint_schema"]
