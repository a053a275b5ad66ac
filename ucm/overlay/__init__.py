"""Import-time checks of an installed overlay, and the facts that `ucm doctor` reports. Standard library only."""
