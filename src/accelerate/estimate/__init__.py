"""Import path kept for compatibility: estimates of the memory that a model needs for training."""
