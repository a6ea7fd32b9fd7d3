"""docs/reference/models.md and models.json agree with the claims in the code and with the results of the suite."""

from __future__ import annotations

import json

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inlay.cli.main import main
from inlay.cli.models import family_rows
from inlay.models.multimodal import MULTIMODAL
from inlay.models.unshared import REFUSED
from tests.model.families.configs import UNSHARED
from tests.model.families.suite import CHECKS
from tests.model.families.survey import PAGE, RESULTS, _is_served, generated
from tests.pages import blocks

RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_recorded_results_are_complete_and_passed():
    assert RECORDED["checks"] == list(CHECKS)
    assert RECORDED["failures"] == {}
    assert all(row["passed"] for row in RECORDED["families"])


def test_every_recorded_claim_equals_the_code():
    claims = json.loads(json.dumps(family_rows()))
    assert [{name: value for name, value in row.items() if name != "passed"} for row in RECORDED["families"]] == claims


def test_every_causal_family_is_served_refused_or_tried():
    assert RECORDED["refused"] == REFUSED
    assert RECORDED["by their text models"] == list(MULTIMODAL)
    unserved = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not _is_served(kind)}
    assert unserved == set(REFUSED) | set(RECORDED["without reuse"])
    assert all(RECORDED["without reuse"][kind] == "passes" for kind in UNSHARED)


def test_models_page_is_generated_from_the_results(capsys):
    assert generated(RECORDED) in PAGE.read_text(encoding="utf-8")
    (shown,) = [block for block in blocks(PAGE) if block.language == "text"]
    assert main(["models", "show", "demo"]) == 0
    assert capsys.readouterr().out == shown.text
