"""Ends in the way that it is told to."""

import os
import signal
import sys

how = sys.argv[1]
if how == "code":
    sys.exit(7)
elif how == "words":
    sys.exit("a last word")
elif how == "error":
    raise KeyError("lost")
elif how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
print(__name__, sys.argv[1:], sys.path[0].endswith("scripts"))
