"""How many milliseconds does a token of one answer take, beside stock transformers and llama.cpp?

    python lab/benchmarks/decode.py --model random:qwen2.5-0.5b

The last line of stdout is one JSON object. The same as ``inlay bench decode``.
"""

import sys

from inlay.cli.main import main

sys.exit(main(["bench", "decode", *sys.argv[1:]]))
