"""From a release's name to its reviewed, installable overlay."""
