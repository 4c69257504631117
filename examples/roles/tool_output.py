"""The rollout worker waits for the end of a tool and reads its output afterwards. The tool prints more than a pipe holds."""

import subprocess
import sys

from job import main, ready, start, tell

TOOL = "import sys; sys.stdout.write('x' * 1_000_000)"


def rollout():
    tool = subprocess.Popen([sys.executable, "-c", TOOL], stdout=subprocess.PIPE)
    tell("tool", tool.pid)
    ready()
    tool.wait()  # <- here
    print(len(tool.stdout.read()))


def driver():
    tell("driver")
    start(rollout).wait()


main(driver, rollout)
