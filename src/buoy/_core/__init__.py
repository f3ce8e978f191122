"""The pure core: policies, their states, and the rules between them.

Standard library only.  Everything else in Buoy imports this; it imports nothing.
"""
