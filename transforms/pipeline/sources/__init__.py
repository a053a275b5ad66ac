"""Find and read the upstream modules of a release."""
