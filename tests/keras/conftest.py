"""One backend per process, by KERAS_BACKEND; `make test-keras` runs all three."""

import importlib.util
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

collect_ignore_glob = [] if importlib.util.find_spec("keras") else ["*.py"]
