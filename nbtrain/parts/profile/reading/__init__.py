"""Reads what ranks have recorded, compares them, and finds what costs most. Pure."""
