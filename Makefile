# Two commands matter: `make demo` and `make test`.  Both set everything up first, in a
# virtual environment of their own, from versions pinned in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check unit wheel bench browser clean

demo: $(READY)
	$(BIN)/buoy demo

test: check unit wheel

# Style and types.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The suite, on all cores; the header says in one line what it leaves out.
unit: $(READY) browser
	$(BIN)/pytest -n auto --dist worksteal

# What the report is tested in; installed where that may be done, else named.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; } || \
	echo "Missing: chromium and chromedriver. The report's page is not tested without them."

# The built wheel installs alone, pulls nothing in, and works.
wheel: $(READY)
	$(BIN)/python tests/try_wheel.py

# Ray is large: it has a target and an environment of its own, and `make test` leaves
# it out.
test-ray:
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip install --quiet --editable '.[torch]' numpy 'ray[train]>=2.40'
	$(VENV)-ray/bin/python tests/try_ray.py

bench: $(READY)
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Buoy needs Python 3.11 or newer, this is %s; set PYTHON=..." % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[torch,jax,cli,report]' --group dev
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-ray build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
