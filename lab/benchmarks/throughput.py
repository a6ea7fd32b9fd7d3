"""How many tokens a second do many concurrent requests get, and how much memory do they take?

    python lab/benchmarks/throughput.py --model random:qwen2.5-0.5b --model random:mha-0.4b

The last line of stdout is one JSON object. The same as ``inlay bench throughput``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
