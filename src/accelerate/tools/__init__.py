"""Programs of their own that stand on the library: migration of scripts, the monitor, estimates of memory."""
