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
PYTHONPATH=tests "$PYTHON" - "$out/job.png" <<'PYTHON' >/dev/null 2>&1
import sys, time
from pages.gallery import CHROMIUM
from pages.test_looks import fill
from playwright.sync_api import sync_playwright
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.status import StatusEvent, StepSample
from allranks.lighthouse.web import http_protocol

with Lighthouse(Options(heartbeat_timeout_s=600.0), ServerOptions(job="llama-pretrain-42"), http=http_protocol()) as lighthouse:
    now = time.time()
    steps = [StepSample(now - 300 + i, 1653 - int(6 * (300 - i)) + (50 if i < 200 else 0)) for i in range(300) if not 190 < i < 201]
    def prepare(service):
        fill(service, 8, incident_at=now - 110)
        service.training.samples.extendleft(reversed(steps))
        service.training._rates.clear()
        service.training._rates.extend([(service.now() - 10, 1592), (service.now(), 1652)])
        service.started = service.clock() - 310
        was = [StatusEvent(now - 310, "connected", f"replica-{i} connected", f"replica-{i}") for i in range(8)]
        was += [StatusEvent(now - 110, "lost", "replica-1 lost", "replica-1"), StatusEvent(now - 85, "connected", "replica-1 connected", "replica-1")]
        kept = [event for event in service.event_log.history if event.kind != "connected"]
        service.event_log.history.clear()
        service.event_log.history.extend([*was, *kept])
    lighthouse.call(prepare)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(f"http://{lighthouse.address}/")
        page.wait_for_selector("body[data-ready=yes]")
        page.locator("#incidents .what").wait_for()
        page.screenshot(path=sys.argv[1])
        browser.close()
PYTHON
ls -l "$out"
