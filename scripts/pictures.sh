#!/usr/bin/env bash
# Makes the pictures of README and docs from recorded dumps of the tests: FOLDER/*.png (docs/images). Needs chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-docs/images}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PYTHON=${PYTHON:-.venv/bin/python}
shoot() { # ADDRESS PNG WIDTH HEIGHT
    chromium --headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync \
        --no-first-run --hide-scrollbars --user-data-dir="$work/profile" --window-size="$3,$4" --screenshot="$2" "$1" 2>/dev/null
}
"$PYTHON" -m allranks diagnose tests/load/cases/flight_recorder/missing_rank --html "$work/verdict.html" >/dev/null || [ $? = 1 ]
shoot "file://$work/verdict.html" "$out/verdict.png" 1200 820
# 1,024 ranks in tensor, data and pipeline groups, of which one is missing: the answer and the timeline of its page.
PYTHONPATH=benchmarks "$PYTHON" - "$work" <<'PYTHON'
import sys
import time
from pathlib import Path

import job_dumps

last = job_dumps.FIRST_STEP + 60 // len(job_dumps.make_job(1024).sites) + 1
job_dumps.START_NS = time.time_ns() - last * job_dumps.STEP_NS - 95_000_000_000
job_dumps.write_boxes(job_dumps.make_job(1024, entries=60), Path(sys.argv[1], "boxes"))
PYTHON
"$PYTHON" -m allranks diagnose "$work/boxes" --html "$work/timeline.html" >/dev/null || [ $? = 1 ]
sed -i 's@</head>@<style>#todo, #guilty, #facts { display: none; }</style></head>@' "$work/timeline.html"
shoot "file://$work/timeline.html" "$out/timeline.png" 1200 960
PYTHONPATH=tests "$PYTHON" - "$out/job.png" <<'PYTHON' >/dev/null 2>&1
import sys
from pages.gallery import CHROMIUM
from pages.jobs import whole_job
from playwright.sync_api import sync_playwright
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse

with Lighthouse(Options(heartbeat_timeout_s=600.0), ServerOptions(job="llama-pretrain-42")) as lighthouse:
    lighthouse.call(lambda service: whole_job(service, 64, "hung"))
    lighthouse.call(lambda service: setattr(service.training, "_moved", service.now() - 73))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 1120})
        page.goto(f"http://{lighthouse.address}/")
        page.wait_for_selector("body[data-ready=yes]")
        page.locator(".evidence .source .hit").wait_for()
        page.add_style_tag(content="#jobs { display: none; }")
        page.screenshot(path=sys.argv[1])
        browser.close()
PYTHON
ls -l "$out"
