"""Orchestrator, pools, workers, links: everything that waits, spawns and talks between processes."""
