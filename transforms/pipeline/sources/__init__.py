"""Where the upstream modules of a release come from."""
