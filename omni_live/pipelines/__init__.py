"""The pipelines in the box."""
