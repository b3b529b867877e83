"""Stream weights out of a running training: with the names of a saved model, bucket by bucket, under every strategy."""
