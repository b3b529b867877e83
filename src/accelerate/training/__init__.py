"""The parts of a training step: accumulation, optimizer, scheduler, averaging, retry, metrics. Internal."""
