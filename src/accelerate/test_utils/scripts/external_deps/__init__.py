"""Scripts that check whole training runs: metrics, checkpoints, reached accuracy."""
