# Everything a newcomer needs. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH := .venv-bench
FLOWER := .venv-flower
# Tests run in two processes; more threads inside each would only fight over the cores.
# Bytecode is kept between the many processes of the tests, also where the environment says otherwise.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow test-flower check format docs pictures site proofs bench clean
.PHONY: wheel smoke lock sbom audit-deps provenance release-check

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

run: setup ## train privately over five parties on the digits, and compare
	@$(BIN)/fulcrum demo

test: setup ## run the tests but the slow ones and those with real Flower processes
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: setup ## run the slow tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m slow

# Flower wants older typer and rich than the lock has, so it lives in an environment of its own.
test-flower: $(FLOWER)/.installed ## run the tests across machines: real Flower processes on loopback, minutes
	FULCRUM_FLOWER=1 $(ONE_THREAD) $(FLOWER)/bin/python -m pytest tests/flower

check: setup ## format, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks $(wildcard docs/*.py docs/site/*.py docs/pictures/*.py) examples/hospitals.py $(wildcard $(patsubst %,examples/%/*.py,heart adult text regression series)) examples/loops/plain.py examples/loops/accumulation.py $(wildcard tools/*.py)

format: setup ## format and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proofs: setup ## after reading a page of docs/privacy again: note the code that it speaks of
	$(BIN)/python docs/proofs.py --write

docs: setup ## write docs/settings.md anew from the settings' own words; one sentence per line in all pages
	$(BIN)/python docs/settings_page.py > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md
	$(BIN)/python docs/sentences.py --write

bench: $(BENCH)/.installed ## time private rounds beside the plain loop and Opacus; writes results/bench-cpu.*
	PYTHONPATH=src $(BENCH)/bin/python benchmarks/cpu.py

wheel: setup ## build dist/*.whl, the same bytes every time
	$(BIN)/python tools/build_wheel.py --check

smoke: wheel ## install the wheel in an empty environment and use it from an empty folder; four minutes
	$(BIN)/python tools/smoke_wheel.py

lock: setup ## write the hashes of requirements.lock anew, after its versions were changed
	$(BIN)/python tools/lock_hashes.py

sbom: setup ## write dist/*.cdx.json, the software bill of materials of .venv
	$(BIN)/python tools/sbom.py

audit-deps: setup ## ask for known vulnerabilities of the pinned dependencies
	$(BIN)/python tools/audit_deps.py

provenance: setup ## write results/*/PROVENANCE.md: where each file's numbers come from
	$(BIN)/python tools/provenance.py

release-check: setup ## go through the release checklist: version, changelog, docs, tests, wheel, smoke
	$(BIN)/python tools/release_check.py

clean: ## remove the environments and the caches; runs/ and .data/ stay
	rm -rf .venv $(FLOWER) $(BENCH) .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests docs -name __pycache__ -prune -exec rm -rf {} +

setup: $(STAMP) ## make .venv with the pinned dependencies (done once)

# torch goes first and alone: its build (CPU or CUDA) is the machine's choice, and builds have hashes of their own. All
# else is what the lock names, file by file (--require-hashes), and nothing besides (--no-deps).
# The project itself is built with the pinned setuptools, without another trip to the package index.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fulcrum needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "Setting up .venv: some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	(echo torch==2.13.0; sed 's/ --hash=.*//' requirements.lock) > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(FLOWER)/.installed: requirements.lock pyproject.toml
	@echo "Setting up $(FLOWER): some minutes, once."
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet torch==2.13.0
	grep -viE '^(typer|rich)==' requirements.lock > $(FLOWER)/requirements.lock
	$(FLOWER)/bin/python -m pip install --quiet --no-deps --require-hashes -r $(FLOWER)/requirements.lock
	$(FLOWER)/bin/python -m pip install --quiet flwr==1.41.0
	$(FLOWER)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# The peers get an environment of their own: nobody needs them to use Fulcrum.
$(BENCH)/.installed: Makefile
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet torch==2.13.0
	$(BENCH)/bin/python -m pip install --quiet opacus==1.6.0 $$(grep -o '^cryptography==[^ ]*' requirements.lock)
	@touch $@

pictures: setup ## make the pictures of README.md anew, from real runs; a minute
	$(BIN)/python docs/pictures/make.py

DOCS := .venv-docs
site: setup $(DOCS)/.installed ## build the documentation as a site in build/site; links and anchors are checked
	$(BIN)/python docs/site/stage.py build/site-pages
	$(DOCS)/bin/mkdocs --quiet build --strict
	@echo "build/site/index.html: open it in a browser; no network is needed."

# The site's generator gets an environment of its own: nobody needs it to use Fulcrum.
$(DOCS)/.installed: docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r docs/site/requirements.txt
	@touch $@
