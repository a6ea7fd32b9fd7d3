"""Advice on schemas: findings about memory, positions and reuse, each with a remedy."""

from inlay.advice.lint.checked import Finding
from inlay.advice.lint.lint import RULES, lint_schema

__all__ = ["RULES", "Finding", "lint_schema"]
