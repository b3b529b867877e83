"""Kinds of devices, as strings; torch and a vendor's extension are imported on first use of a kind."""
