"""The weights that ship with the robot pipeline; a folder is packaged if it has an `__init__.py`."""
