"""Settings of a run: options, each declared once, from arguments, flags, configuration file and environment."""
