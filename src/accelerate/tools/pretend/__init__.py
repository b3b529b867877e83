"""Run a script as one rank of a world that isn't there, without values, and report what that rank would do."""
