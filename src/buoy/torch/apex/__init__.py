"""Scripts written for apex.amp, after changing the import.

from buoy.torch.apex import amp            # was: from apex import amp
"""

from buoy.torch.apex import amp

__all__ = ["amp"]
