"""Configuration as data, in three layers: registry of pipelines, deploy file, placement plan."""
