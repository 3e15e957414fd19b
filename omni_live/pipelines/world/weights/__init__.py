"""The weights that ship with the world pipeline; a folder is packaged if it has an `__init__.py`."""
