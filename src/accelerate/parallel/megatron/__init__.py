"""Megatron-LM as a strategy; never run against the real engine. Internal."""
