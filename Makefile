# `make setup` makes the developers' environment, in .venv, from the versions pinned in
# constraints.txt.  Every other command does so first where it was not done yet.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERAS := $(VENV)-keras
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JAX_PLATFORMS ?= cpu
# Some virtual machines advertise AMX and then fault on it: a plain BF16 nn.Linear ends
# the process with SIGILL.  This keeps oneDNN below AMX; without AMX it is no limit.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: setup demo test quick check unit wheel long coverage mutants bench browser clean release-check docs test-keras test-qat test-integrations test-ray

setup: $(READY)

# Keras joins where `make test-keras` has made its environment.
demo: $(READY)
	$(BIN)/buoy demo
	@[ ! -e $(KERAS)/.ready ] || for backend in tensorflow jax torch; do \
	KERAS_BACKEND=$$backend TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 \
	$(KERAS)/bin/python examples/keras_fit.py || exit 1; done

# What a pull request needs, in ten minutes on two cores, this environment included.
test: check unit wheel
	@echo 'All passed. Left out: long samples, the report in a browser, Keras, quantization tools, training libraries. `.ci/run` runs these, too.'

# Style and types.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `make COVERAGE=yes ...` notes which lines are reached, for `make coverage`.
PYTEST := python -m $(if $(COVERAGE),coverage run -m) pytest -q
PARALLEL := -n auto --dist worksteal

# The suite without its long samples.
unit: $(READY)
	$(BIN)/$(PYTEST) $(PARALLEL) -m 'not long'

# The long samples, and the report in a browser.
long: $(READY) browser
	$(BIN)/$(PYTEST) $(PARALLEL) -m long

# Which lines of the package the tests that are not slow do not reach; and, with
# COVERAGE=yes before, those that were run so.  A test that fails here only because it is
# measured does not count: `make test` runs the same ones.
coverage: $(READY)
	-$(BIN)/python -m coverage run -m pytest -q $(PARALLEL) -m 'not slow' tests
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# While writing: style, types and the tests that are not slow, in about three minutes on
# two cores.
quick: check
	$(BIN)/$(PYTEST) $(PARALLEL) -m 'not slow' tests

# Small changes of the code that the tests must notice; 60 of them, chosen by a seed.
mutants: $(READY)
	$(BIN)/python tools/mutants.py

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

# The site, into build/site; a warning is an error.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site

# Before a release: build wheel and sdist into dist/, install each alone, and run the
# suite against the wheel instead of the checkout.
RELEASE := $(VENV)-release
release-check: $(READY) browser
	rm -rf dist $(RELEASE)
	$(BIN)/python tests/try_wheel.py --keep dist
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --upgrade pip
	wheel=$$(ls $(CURDIR)/dist/*.whl) && $(RELEASE)/bin/python -m pip install --quiet \
	  "$$wheel[torch,jax,cli,report]" --group dev
	$(RELEASE)/bin/python -c 'import buoy, sys; sys.exit("site-packages" not in buoy.__file__ and "not the wheel: " + buoy.__file__)'
	$(RELEASE)/bin/pytest -n auto --dist worksteal tests

# Keras on TensorFlow, JAX and torch: an environment of their own, one run per backend.
# The tests of TensorFlow itself make logical devices before it starts: a run alone.
test-keras: $(KERAS)/.ready
	KERAS_BACKEND=tensorflow $(KERAS)/bin/$(PYTEST) tests/keras/test_tensorflow.py
	for backend in tensorflow jax torch; do echo "== Keras on $$backend" && \
	KERAS_BACKEND=$$backend $(KERAS)/bin/$(PYTEST) $(PARALLEL) tests/keras src/buoy/keras \
	    --ignore tests/keras/test_tensorflow.py || exit 1; done
	KERAS_BACKEND=torch $(KERAS)/bin/$(PYTEST) tests/test_docs.py -k 'keras or tensorflow'
	$(KERAS)/bin/$(PYTEST) src/buoy/tensorflow src/buoy/_backends/tensorflow.py \
	    tests/test_sample.py -k tensorflow

# Quantisation tools of others, in the same environment.
test-qat: $(KERAS)/.ready
	$(KERAS)/bin/$(PYTEST) tests/qat

# nvidia-modelopt imports huggingface_hub, and does not declare it.  tf_keras asks for
# `tensorflow`, whose CPU build has another name: it is installed alone.
$(KERAS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERAS)
	$(KERAS)/bin/python -m pip install --quiet --upgrade pip
	$(KERAS)/bin/python -m pip install --quiet --editable '.[torch,jax,keras,cli,report]' \
	    tensorflow-cpu tensorboard coverage pytest pytest-xdist hypothesis \
	    torchao nvidia-modelopt huggingface_hub
	$(KERAS)/bin/python -m pip install --quiet --no-deps tf_keras
	touch $@

# Training libraries: an environment of their own.
INTEGRATIONS := $(VENV)-integrations
test-integrations: $(INTEGRATIONS)/.ready
	$(INTEGRATIONS)/bin/$(PYTEST) tests/integrations
	$(INTEGRATIONS)/bin/$(PYTEST) tests/test_docs.py -k 'accelerate or transformers or lightning or deepspeed or recipes or integrations'

# DeepSpeed's package is built here, and compiles nothing.  torchvision, which some ask
# for, is built for CUDA: where it can be found, Lightning cannot be imported.
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade pip
	$(INTEGRATIONS)/bin/python -m pip install --quiet --editable '.[torch,cli]' \
	    accelerate transformers trl datasets peft bitsandbytes lightning pytorch-ignite coverage pytest hypothesis \
	    setuptools diffusers requests fastprogress fasttransform fastdownload pillow matplotlib \
	    opencv-python-headless scikit-learn cloudpickle ray tensordict codetiming hydra-core torchdata
	DS_BUILD_OPS=0 $(INTEGRATIONS)/bin/python -m pip install --quiet --no-build-isolation deepspeed
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps fastai timm ultralytics ultralytics-thop verl
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps --target $(INTEGRATIONS)/vision torchvision
	touch $@

# Ray is large: it has an environment of its own, and nothing else runs this.
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
	rm -rf $(VENV) $(VENV)-ray $(KERAS) $(INTEGRATIONS) $(RELEASE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
