"""The tier that stores blocks as files."""
