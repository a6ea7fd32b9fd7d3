"""Training of the bundled model: its tokenizer, its curriculum, and its export for ``demo``.

It is not in the installed package. Run ``python -m inlay_lab.train.train --out DIRECTORY`` from a checkout.
"""

import tomllib
from pathlib import Path

from inlay_lab.eval.documents import add_wordings

add_wordings(tomllib.loads(Path(__file__).with_name("more.toml").read_text(encoding="utf-8")))
