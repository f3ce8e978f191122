"""The core: policies, their states, and replay.

Standard library only.  It imports no other package of Buoy.
"""
