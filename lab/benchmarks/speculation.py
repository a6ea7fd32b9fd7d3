"""How many tokens a second do drafts give, on answers that copy text and on answers that do not?

    python lab/benchmarks/speculation.py --model demo

With --json, stdout is one JSON object. The same as ``inlay bench speculation``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "speculation", *sys.argv[1:]]))
