"""What the user asked for: typed options, each declared once, read from arguments, flags, file and environment."""
