"""The tier of files."""
