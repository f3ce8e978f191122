"""Doctests of front ends whose framework is not installed are not collected.

`make test-keras` and `make test-integrations` have environments that do.
"""

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("keras") is None:
    collect_ignore_glob.append("buoy/keras/*")
if find_spec("lightning") is None:
    collect_ignore_glob.append("buoy/integrations/lightning.py")
if find_spec("tensorflow") is None:
    collect_ignore_glob += ["buoy/tensorflow/*", "buoy/_backends/tensorflow.py"]
    collect_ignore_glob += ["buoy/keras/replicas.py"]
