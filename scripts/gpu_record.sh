#!/usr/bin/env bash
# The recorder on real NCCL: 4 ranks share one GPU. Prints PASS or FAIL per claim and numbers; boxes go to $OUT.
# Needs torch with CUDA and numpy; nothing else has to be installed. `BACKEND=gloo` rehearses it without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/carry/site${PYTHONPATH:+:$PYTHONPATH}"
export OUT="${OUT:-$(mktemp -d)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"

# The part in C, when there is a compiler; without it the same is done in Python.
SUFFIX=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
INCLUDE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
BUILT="src/allranks/recording/_fast$SUFFIX"
if [ ! -e "$BUILT" ] || [ src/allranks/recording/_fast.c -nt "$BUILT" ]; then
    cc -O2 -fPIC -shared -I"$INCLUDE" src/allranks/recording/_fast.c -o "$BUILT.new" 2>"$OUT/cc.txt" \
        && mv "$BUILT.new" "$BUILT" && echo "built the part in C" || echo "no compiler: nothing is recorded"
fi
exec timeout 170 "$PYTHON" scripts/gpu_record.py
