"""Omni Live, the session server for interactive models. Importing this imports nothing heavy."""

__version__ = "0.1.0"
