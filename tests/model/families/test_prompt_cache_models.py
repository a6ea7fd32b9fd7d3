"""The models of the Prompt Cache paper, tiny, with a schema of examples/, against Prompt Cache done with stock code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inlay import Prompt, Schema
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import oracle_logits
from tests.model.families.configs import tiny
from tests.model.families.oracle import ComposedPrompt

EXAMPLES = Path(__file__).parents[3] / "examples"


SHORT = [("falcon", "schema"), ("mpt", "packed")]
CASES = [
    pytest.param(name, positions, marks=() if (name, positions) in SHORT else pytest.mark.slow)
    for name in ("llama-2", "codellama", "falcon", "mpt")
    for positions in ("schema", "packed")
]


@pytest.mark.parametrize(("name", "positions"), CASES)
def test_a_schema_of_the_examples(name, positions):
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse="anchored", positions=positions)
    recorder.llm.add_schema(Schema.from_file(EXAMPLES / "trip" / "trip.xml"))
    prompt = Prompt.from_file(EXAMPLES / "trip" / "prompt.xml")
    ((_, first),) = recorder.greedy([prompt], 2)
    ((output, logits),) = recorder.greedy([prompt], 2)  # all but the new text comes from the store
    answer = list(output.outputs[0].token_ids)
    expected = torch.stack(
        oracle_logits(loaded, recorder.llm, prompt, answer, "anchored", positions, make_oracle=ComposedPrompt)
    )
    close(first, expected)
    close(logits, expected)
    assert output.usage.cached_tokens > 10 * output.usage.computed_tokens
