"""What a training script does wrong with loss scaling, in words.

`watching` records facts while the script runs, `findings` are pure rules over them.
"""

from buoy.diagnose.doctor.examine import Doctor, Examined, examine
from buoy.diagnose.doctor.findings import Finding

__all__ = ["Doctor", "Examined", "Finding", "examine"]
