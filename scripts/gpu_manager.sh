#!/bin/sh
# The manager on a real GPU: several NCCL ranks share one device; one is killed, the others abort and re-create their
# communicator in place, go on, and a new replica heals. Prints PASS or FAIL for each claim, and numbers.
# Needs torch with CUDA. The lighthouse needs msgspec: from ./carry/site when it is not installed; the same folder
# may carry xxhash. Writes $OUT/gpu_manager.json. About 3 minutes.
set -u
OUT=${OUT:-$(mktemp -d)}
HERE=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$HERE/src:$HERE/carry/site${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
exec timeout 280 "$PYTHON" "$HERE/scripts/gpu_manager.py" "$OUT"
