"""What the user asked for: options, each declared once, from arguments, flags, file and environment."""
