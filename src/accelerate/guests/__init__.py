"""Capabilities that attach to the core through its seams; each folder can be deleted without harm to anything else."""
