"""`python -m transforms`: the same commands as `nox`, for an environment that already has the build's packages."""

from __future__ import annotations

import gc
import sys

from transforms.pipeline.cli import main

if __name__ == "__main__":
    gc.disable()  # see `transforms.pipeline.parallel`
    sys.exit(main())
