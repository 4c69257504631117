"""`python -m allranks` is the `allranks` command."""

from allranks.cli import run

run()
