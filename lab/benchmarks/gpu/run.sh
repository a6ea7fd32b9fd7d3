#!/bin/sh
# All measurements on a GPU: checks, the cost model's coefficients, then the figures. Results go to
# lab/benchmarks/results/, a folder for each device. Options such as --dry are passed on; PYTHON names the interpreter.
set -eu
here=$(dirname "$0")
python=${PYTHON:-python}
export PYTHONUNBUFFERED=1
"$python" "$here/checks.py" "$@"
"$python" "$here/calibrate.py" "$@"
costs=$(ls -t "$here"/../results/*/costs.json 2>/dev/null | head -n 1 || true)
if [ -z "${INLAY_TRITON_COSTS:-}" ] && [ -n "$costs" ]; then
    export INLAY_TRITON_COSTS="$costs"
fi
"$python" "$here/attention.py" "$@"
"$python" "$here/prompt_cache.py" "$@"
"$python" "$here/throughput.py" "$@"
