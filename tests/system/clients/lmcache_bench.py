"""LMCache's benchmarks about text that is read in other places, as they are, in sizes that take seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.server.clients.site import Client

LMCACHE = Client("lmcache", "lmcache")
QUESTIONS = [
    {
        "id": f"q{number}",
        "question": "Who is the mayor?",
        "answers": ["Rosa Tilen"],
        "ctxs": [
            {"title": "Bravel", "text": "Rosa Tilen is the mayor."},
            {"title": "Monar", "text": f"Glass {number}."},
        ],
    }
    for number in range(2)
]
WORKLOADS = {
    "rag-qa-quality": "--rag-dataset questions.json --rag-num-samples 2 --rag-max-output-length 8 "
    "--rag-doc-align-tokens 32 --rag-output rag.json --rag-template-kwargs thinking=false",
    "long-doc-permutator": "--ldp-num-contexts 3 --ldp-context-length 40 --ldp-system-prompt-length 30 "
    "--ldp-num-permutations 6 --ldp-num-inflight-requests 2 --ldp-max-output-length 4 --ignore-eos",
}


def bench(workload: str, base: str, model: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``lmcache bench engine`` with sizes that take seconds; its files go into the folder."""
    (folder / "questions.json").write_text(json.dumps(QUESTIONS))
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "engine", "--engine-url", base, "--model", model]
    command += ["--workload", workload, "--tokens-per-gb-kvcache", "6000", "--no-interactive", "--quiet", "--json"]
    environment = dict(os.environ)
    if LMCACHE.path is not None:
        environment["PYTHONPATH"] = str(LMCACHE.path)
    return subprocess.run(
        [*command, *WORKLOADS[workload].split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
