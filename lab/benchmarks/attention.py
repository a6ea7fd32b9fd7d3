"""How long does attention take when sequences share a prefix, and how far is that from the machine's limits?

    python lab/benchmarks/attention.py --part table3 --dtype float32

The last line of stdout is one JSON object. The same as ``inlay bench attention``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "attention", *sys.argv[1:]]))
