"""How much sooner does the first token come when the documents in the prompt are cached?

    python lab/benchmarks/ttft.py --model random:qwen2.5-0.5b --cached 2048 --new 32

The last line of stdout is one JSON object. The same as ``inlay bench ttft``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "ttft", *sys.argv[1:]]))
