"""How the bundled model is trained: its tokenizer, what it learns in which order, and how it is written for ``demo``.

Not in the package that is installed; ``python -m inlay_lab.train.train --out DIRECTORY`` runs it from a checkout.
"""

import tomllib
from pathlib import Path

from inlay_lab.eval.documents import add_wordings

add_wordings(tomllib.loads(Path(__file__).with_name("more.toml").read_text(encoding="utf-8")))
