"""How fast are the modules of a schema encoded, beside the stock model on the same texts?

    python lab/benchmarks/encode.py --model random:qwen2.5-0.5b

The last line of stdout is one JSON object. The same as ``inlay bench encode``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "encode", *sys.argv[1:]]))
