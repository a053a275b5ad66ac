"""``python -m ucm`` is ``ucm``, for environments whose ``bin`` is not on the PATH."""

import sys

from ucm.cli import main

sys.exit(main())
