"""Show what a reviewer reads before an overlay is accepted: as a page, and in the terminal."""
