"""Weights that leave a run while it trains: under the names of a saved model, bucket by bucket, from every strategy."""
