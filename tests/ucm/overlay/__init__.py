"""The import-time half, in real interpreters and virtual environments."""
