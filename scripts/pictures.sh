#!/usr/bin/env bash
# Makes the pictures of the README from recorded dumps of the tests: docs/images/*.png. Needs chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PYTHON=${PYTHON:-.venv/bin/python}
shoot() { # HTML PNG WIDTH HEIGHT
    chromium --headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync \
        --no-first-run --hide-scrollbars --user-data-dir="$work/profile" --window-size="$3,$4" --screenshot="$PWD/$2" "file://$1" 2>/dev/null
}
"$PYTHON" -m allranks diagnose tests/load/cases/flight_recorder/missing_rank --html "$work/verdict.html" >/dev/null || [ $? = 1 ]
shoot "$work/verdict.html" docs/images/verdict.png 1200 820
ls -l docs/images
