"""Kinds of devices, as strings; torch and a vendor's extension are imported by the row that is used. Internal."""
