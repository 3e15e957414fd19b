"""Simulated worlds for the clients to act in. They need numpy and nothing else."""
