"""Scripts written for apex.amp, after changing the import.

from buoy.integrations.apex import amp            # was: from apex import amp
"""

from buoy.integrations.apex import amp

__all__ = ["amp"]
