"""The unit tests: they need no model and no process. ``pytest tests --unit`` runs these files and no others."""

from __future__ import annotations

import importlib.abc
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

import pytest

HERE = Path(__file__).parent
FOLDERS = ("api/", "attention/", "authoring/", "cluster/", "kv/", "output/", "pml/", "prompt/", "sampling/")
FILES = (
    "engine/test_fairness.py",
    "test_events.py",
    "test_logprobs.py",
    "test_policy.py",
    "test_strict_json.py",
    "test_types.py",
    "test_whole_file.py",
)
#: Files and folders in them that need a model or a process. Triton's interpreter is slow.
LEFT_OUT = (
    "api/anthropic/",
    "api/responses/",
    "api/test_made_up_bodies.py",
    "api/test_tool_pieces.py",
    "api/openai/test_read.py",
    "api/openai/test_respond.py",
    "api/openai/test_tools_request.py",
    "api/tools/test_formats.py",
    "api/tools/test_parsers.py",
    "api/tools/test_round_trip.py",
    "attention/test_devices.py",
    "attention/test_install.py",
    "attention/triton/",
    "authoring/lint/test_claims.py",
    "authoring/memory/test_families.py",
    "authoring/memory/test_layers.py",
    "authoring/memory/test_named.py",
    "authoring/test_layout_plot.py",
    "cluster/test_pieces.py",
    "cluster/test_remote_client.py",
    "cluster/test_remote_client_faults.py",
    "cluster/test_schema_folder.py",
    "cluster/test_serve.py",
    "cluster/test_serve_faults.py",
    "cluster/test_shared_schemas.py",
    "cluster/test_wire.py",
    "kv/offload/test_disk.py",
    "kv/offload/test_files.py",
    "kv/offload/test_shared.py",
    "kv/test_identity.py",
    "pml/test_dialect.py",
    "pml/test_json_form.py",
    "pml/test_program_engine.py",
    "pml/test_program_functions.py",
    "prompt/test_anchors.py",
    "prompt/test_beginning.py",
    "prompt/test_borders.py",
    "prompt/test_chat_options.py",
    "prompt/test_chat_tools.py",
    "prompt/test_clock.py",
    "prompt/test_contexts.py",
    "prompt/test_conversation.py",
    "prompt/test_conversation_templates.py",
    "prompt/test_found_pieces.py",
    "prompt/test_request.py",
    "prompt/test_splice.py",
    "prompt/test_tool_pieces.py",
    "sampling/test_adjust.py",
    "sampling/test_compiled.py",
    "sampling/test_defaults.py",
    "sampling/test_device.py",
    "sampling/test_filters.py",
    "sampling/test_grammar_forms.py",
    "sampling/test_structured.py",
)


def is_left_out(path: Path) -> bool:
    """Return whether a test file is no unit test, or a folder holds none."""
    if path == HERE:
        return False
    name = path.relative_to(HERE).as_posix()
    if path.is_dir():
        return not any(each.startswith(f"{name}/") or f"{name}/".startswith(each) for each in (*FOLDERS, *FILES))
    return name not in FILES and (not name.startswith(FOLDERS) or name.startswith(LEFT_OUT))


class NoModels(importlib.abc.MetaPathFinder):
    """Refuses the import of model code, so that a file that needs it fails."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name == "transformers.modeling_utils":
            raise ImportError("a unit test needs a model; leave its file out in tests/unit.py")
        return None


def no_process(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("a unit test starts a process; leave its file out in tests/unit.py")
