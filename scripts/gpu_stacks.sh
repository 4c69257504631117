#!/bin/sh
# A real NCCL hang of two ranks that share one GPU, collected by our own code.
#
# Rank 0 enters one all_reduce more than rank 1. Collected: black boxes' absence (none here), /proc, NCCL RAS
# twice (text) and once as JSON, py-spy where it was carried (./carry/py-spy or ./carry/site), cuda-gdb kernels of
# both ranks. Writes $OUT/nccl_hang.tar.gz: the bundle with its raw files and its provenance, for
# tests/stacks/cases. Needs torch with CUDA; no msgspec. Prints PASS or FAIL for each claim. About 2 minutes.
set -u
OUT=${OUT:-$(mktemp -d)}
HERE=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$HERE/src:$HERE/carry/site${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$HERE/carry/py-spy" ] && export ALLRANKS_PYSPY="$HERE/carry/py-spy"
[ -x "$HERE/carry/site/bin/py-spy" ] && [ -z "${ALLRANKS_PYSPY:-}" ] && export ALLRANKS_PYSPY="$HERE/carry/site/bin/py-spy"
export TMPDIR=${TMPDIR:-/tmp}
mkdir -p "$OUT"
cd "$OUT" || exit 2
exec timeout 240 "$PYTHON" "$HERE/scripts/gpu_stacks.py" "$OUT"
