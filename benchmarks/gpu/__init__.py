"""Proof and figures of one stay on a CUDA device, in parts: `python -m benchmarks.gpu` (`make gpu`)."""
