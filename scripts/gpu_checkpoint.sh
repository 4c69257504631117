#!/bin/sh
# Checkpoints of a model on one CUDA device: copy bandwidth, overlap with compute, and bit-equal restore.
# Prints PASS or FAIL per goal and writes gpu_checkpoint.json to $OUT (default: the current folder).
set -eu
mkdir -p "${OUT:=.}"
export OUT
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here/../src:$here/../carry/site${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/gpu_checkpoint.py" "$@"
