#!/usr/bin/env bash
# Runs every test on every version of Python and torch that we promise.
#
#   scripts/test_all.sh                            all of them, one after the other, each in an environment of its own
#   scripts/test_all.sh 3.13:2.13.0 3.12:2.15.0    only these (PYTHON:TORCH; a python may be a path)
#   TESTS="tests/record tests/frtrace" scripts/test_all.sh 3.10:2.13.0      only these folders
#   WORK=FOLDER KEEP=1                             leave the environments in FOLDER, and use those that are there (up to 8 GB each)
#
# Prints one line per pair, writes the numbers to docs/compatibility.md, and exits 1 when a test failed. A Python
# that is not on this machine is skipped by its name. Pythons are looked for in pyenv, then on the PATH.
set -uo pipefail
cd "$(dirname "$0")/.."
PAIRS=("$@")
[ ${#PAIRS[@]} -gt 0 ] || PAIRS=(3.11:2.15.0 3.13:2.15.0 3.10:2.13.0 3.12:2.13.0 3.12:2.11.0)
TESTS="${TESTS:-tests}"
WORK="${WORK:-$(mktemp -d "${TMPDIR:-/tmp}/test_all.XXXXXX")}"
mkdir -p "$WORK/results"
TABLE=()
FAILED=0

find_python() {  # "3.10", or a path
    [ -x "$1" ] && { echo "$1"; return; }
    local found
    found=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python 2>/dev/null | sort -V | tail -1)
    [ -n "$found" ] && { echo "$found"; return; }
    command -v "python$1" || true
}

make_environment() {  # folder, python, torch
    "$1/bin/python" -c "import allranks, torch; assert torch.__version__.split('+')[0] == '$3'" && return
    "$2" -m venv "$1" && "$1/bin/python" -m pip install -q "torch==$3" -e '.[dev]'
}

for pair in "${PAIRS[@]}"; do
    version="${pair%:*}" torch="${pair##*:}"
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        TABLE+=("$pair|skipped: no Python $version here")
        continue
    fi
    env="$WORK/$(echo "$pair" | tr -c 'a-zA-Z0-9.\n' _)"
    echo "== $pair in $env" >&2
    if ! make_environment "$env" "$python" "$torch" >"$env.log" 2>&1; then
        TABLE+=("$pair|FAILED: cannot be installed, see $env.log")
        FAILED=1
        continue
    fi
    said=$("$env/bin/python" -c 'import platform, torch; print(f"python-{platform.python_version()}_torch-{torch.__version__}".split("+")[0])')
    begin=$SECONDS log="$WORK/results/$said"
    # shellcheck disable=SC2086
    PYTHONDONTWRITEBYTECODE= PATH="$env/bin:$PATH" "$env/bin/python" -m pytest -q -p no:cacheprovider --everything \
        -n "${WORKERS:-$(($(nproc) + 4))}" --dist loadfile --no-loadscope-reorder --junitxml="$log.xml" $TESTS >"$log.log" 2>&1 || FAILED=1
    TABLE+=("$said|$(tail -1 "$log.log" | tr -d '='); $((SECONDS - begin)) s; log $log.log")
    grep -E "^(FAILED|ERROR)" "$log.log" >&2
    [ -n "${KEEP:-}" ] || rm -rf "$env"
done
printf '%s\n' "${TABLE[@]}" | column -t -s '|'
python3 scripts/compatibility.py --versions "$WORK/results"
exit "$FAILED"
