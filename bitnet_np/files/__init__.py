"""Model files: read, checked, converted, written."""
