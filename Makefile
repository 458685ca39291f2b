# Every target installs first; a second run finds the stamp and is quick, with or without a network.
#   make demo PYTHON=python3.12    another interpreter      make test VENV=/tmp/venv    another place

VENV  ?= .venv
# 15 runs: three seeds show differences as large as these; how often a recipe trains would take five.
DEMO  ?= --recipes post post+warmup pre --lrs 1e-3 2e-3 --seeds 3
BIN   := $(VENV)/bin
# The stamp's name is the content of what was installed, so a checkout that only touches files costs nothing.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
DOCS_STAMP := $(STAMP)-docs
# A demo needs no developer tools: in a new checkout it installs the laboratory alone, and `make install` the rest.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(STAMP)-demo)
# Two workers of one core each; a training that a test starts counts its own threads. Each begins with one half of
# the tests in order, so that what the tests of a file share is made once.
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# The marks are explained in pyproject.toml.
QUICK := not slow and not wide and not long
SLOW := slow and not wide and not long
# A test that hangs fails and says where; those that are run by hand may take longer.
NO_HANG := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
# The tests that compute, and what makes torch, MKL and oneDNN compute as on other processors.
COMPUTING := $(addprefix tests/,checks contracts oracles parity nn initial optim diagnosis trace papers lab/tasks lab/training \
  lab/comparison judging)
# The tests of the instruments, which read what torch keeps to itself (src/normlab/private_torch.py).
INSTRUMENTS := tests/test_private_torch.py $(addprefix tests/,trace seam setups checks diagnosis trials watching parallel)
PROCESSORS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 \
  ONEDNN_MAX_CPU_ISA=AVX2
export PYTHON
# Each process of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo lint test test-slow test-wide test-corpus test-mutations test-ranks test-bare test-beside \
  test-oldest test-isa format docs bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

install: $(STAMP) ## virtual environment with everything, pinned by constraints.txt

$(STAMP):
	@bash tools/install.sh $(VENV)
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(DEMO_STAMP) ## compare recipes on the built-in corpus and write the page; DEMO="--seeds 5" changes it
	$(BIN)/normlab compare $(DEMO)

$(STAMP)-demo:
	@bash tools/install.sh $(VENV) lab
	@touch $@

lint: $(STAMP) ## style, import layers, types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command as run; run()' --no-cache --no-logo
	$(BIN)/python -m pyrefly check

test: lint ## lint, then every test that takes less than about a second
	$(PYTEST) $(NO_HANG) -m "$(QUICK)"

test-slow: $(STAMP) ## the tests that take longer, up to minutes
	$(PYTEST) $(NO_HANG) -m "$(SLOW)"

test-wide: $(STAMP) ## more of what test-slow has a few of: public reports, pairs of parts, points of failure, ranks
	$(PYTEST) $(NO_HANG) -m wide

test-corpus: $(STAMP) ## every case of the corpus, of which test-slow and test-wide judge a part
	$(PYTEST) $(NO_HANG) -m "not ($(QUICK))" tests/corpus

test-mutations: $(STAMP) ## every error that must be caught, planted one at a time
	$(PYTEST) $(NO_HANG) -m long tests/test_mutations.py

test-ranks: $(STAMP) ## every script of several processes and every mistake planted into one, of which test-slow and test-wide have a part
	$(PYTEST) $(NO_HANG) -m "not ($(QUICK))" tests/parallel

test-beside: $(STAMP) ## what installing normlab changes beside transformers, TRL, Lightning and datasets
	@bash tools/beside.sh $(BIN)/python build/beside

test-bare: $(STAMP) ## the instruments beside torch and the base dependencies, in an environment of their own
	@bash tools/bare.sh $(BIN)/python build/bare

test-oldest: BIN := build/oldest/bin
test-oldest: ## the tests of the instruments under the oldest torch that pyproject.toml allows, in an environment of its own
	@bash tools/oldest.sh build/oldest
	$(PYTEST) $(NO_HANG) -m "$(QUICK)" $(INSTRUMENTS)

test-isa: $(STAMP) ## the tests that compute, as on five other processors
	@failed=0; for processor in $(PROCESSORS); do echo "== $$processor"; \
	  env $$processor $(PYTEST) -m "$(QUICK)" $(COMPUTING) || failed=1; done; exit $$failed

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

docs: $(DOCS_STAMP) ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

$(DOCS_STAMP): $(STAMP)
	@bash tools/install.sh $(VENV) docs
	@touch $@

bench: $(STAMP) ## time a training step against peers
	@for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean: ## remove the environment, caches and builds; run folders stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
