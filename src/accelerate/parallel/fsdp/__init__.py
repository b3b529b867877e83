"""Fully sharded data parallelism, versions 1 and 2. Internal."""
