# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEBIAN := etcd-server etcd-client chromium fonts-dejavu-core slurmctld slurmd slurm-client munge gdb iproute2 nftables iptables strace

.PHONY: demo test test-all lint soak bench gallery docs site screenshots packages clean

demo: $(STAMP)
	$(BIN)/allranks demo

# Many tests wait for processes, so there are more workers than cores; WORKERS=0 runs them in order. Compiled files are
# kept, also where the environment says otherwise: a thousand processes import us.
WORKERS ?= $(shell expr $$(nproc) + 4)
test: $(STAMP) packages
	@find src -depth -type d -name __pycache__ -execdir sh -c 'ls *.py >/dev/null 2>&1 || rm -r __pycache__' \;  # of packages that a pull has removed
	@find src -depth -type d -empty -delete
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/forks.py suite $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Every test, also those that `make test` leaves out, on the versions of Python and torch that we promise, each in an
# environment of its own.
test-all:
	bash scripts/test_all.sh $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Real trainings under faults: LENGTH in seconds, SEED repeats a plan.
LENGTH ?= 3600
soak: $(STAMP) packages
	$(BIN)/python -m tests.soak.run --length $(LENGTH) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: $(STAMP)
	for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Runs every script of examples/hangs and writes the page of its verdict to gallery/.
gallery: $(STAMP)
	$(BIN)/python examples/hangs/gallery.py --output gallery

# The documentation site, in site/, with pictures of every page and report at every width in site/screenshots.
docs: site screenshots

# Broken links are errors. Reading the site needs no network.
site:
	test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install --quiet 'mkdocs-material>=9.5'; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "wrote site/index.html"

# What the tests look at in a browser, kept: 3, 64 and 1,024 ranks, 400, 1,000 and 1,600 px, light and dark.
screenshots: $(STAMP) packages
	ALLRANKS_SCREENSHOTS=site/screenshots $(BIN)/python -m pytest -q -p no:randomly --everything tests/pages/test_looks.py
	$(BIN)/python scripts/screenshots.py site/screenshots

$(STAMP): pyproject.toml constraints.txt src/allranks/recording/_fast.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Debian packages for the tests of etcd, Slurm, the browser and the network; only as root, only when missing.
packages:
	@sh scripts/debian_packages.sh $(DEBIAN)

clean:
	rm -rf $(VENV) .venv-docs site gallery build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
