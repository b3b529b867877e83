"""The parts of a training step: accumulation, optimizer, scheduler, weight averaging, retry. Internal."""
