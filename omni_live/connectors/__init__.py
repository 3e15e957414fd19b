"""Connectors carry payload bytes between stages and give small tickets."""
