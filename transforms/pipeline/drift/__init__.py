"""Find what has moved in a release, known or new: try every rule, and report every failure."""
