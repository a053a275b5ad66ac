"""What an installed overlay needs at import time, and what tells an operator about it. Standard library only."""
