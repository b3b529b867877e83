"""Scripts that check this installation under ``accelerate launch``; a failed check raises."""
