"""`python -m allranks.frtrace`: the same as `allranks frtrace`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["frtrace"]
    runpy.run_module("allranks", run_name="__main__")
