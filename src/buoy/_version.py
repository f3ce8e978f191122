"""The version, read by the package, the command and the build."""

__version__ = "0.1.0"
