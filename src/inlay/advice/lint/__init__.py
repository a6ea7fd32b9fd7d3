"""Advice on schemas: what costs memory, positions or reuse, and what to write instead."""

from inlay.advice.lint.checked import Finding
from inlay.advice.lint.lint import RULES, lint_schema

__all__ = ["RULES", "Finding", "lint_schema"]
