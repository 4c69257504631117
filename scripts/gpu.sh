#!/usr/bin/env bash
# Every check that needs a GPU: recorder, stacks, checkpoints, manager, shapes of programs, first contact with GPT-2.
#   scripts/gpu.sh --list                         what there is, and how long each takes at most
#   scripts/gpu.sh --only record,manager          a slice; results stay in $OUT (default ./gpu-results)
#   scripts/gpu.sh --table                        one table of all slices, and gpu.json for docs/performance.md
# Needs torch with CUDA. Nothing has to be installed: what is missing may lie in ./carry/site (msgspec, PyYAML, py-spy).
# torchft for comparison: scripts/gpu.sh --only first_contact --torchft=FOLDER (an unpacked wheel with its dependencies).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/carry/site${PYTHONPATH:+:$PYTHONPATH}" PATH="$PATH:$PWD/carry/site/bin" PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"

[ -x carry/site/bin/py-spy ] && export ALLRANKS_PYSPY="${ALLRANKS_PYSPY:-$PWD/carry/site/bin/py-spy}"

# The part in C, when there is a compiler; without it nothing is recorded.
SUFFIX=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
INCLUDE=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
BUILT="src/allranks/recording/_fast$SUFFIX"
if [ ! -e "$BUILT" ] || [ src/allranks/recording/_fast.c -nt "$BUILT" ]; then
    cc -O2 -fPIC -shared -I"$INCLUDE" src/allranks/recording/_fast.c -o "$BUILT.new" 2>/dev/null && mv "$BUILT.new" "$BUILT" \
        || echo "no compiler: nothing is recorded"
fi
exec "$PYTHON" scripts/gpu.py "$@"
