"""The place of this package: a checkout of the repository, or the wheel of the tooling."""

from __future__ import annotations

import re
from pathlib import Path

#: The copies in the wheel of the tooling: the runtime, the reviewed locks, the licence. A checkout has none.
SHIPPED = Path(__file__).parent / "shipped"
IS_CHECKOUT = not SHIPPED.is_dir()
#: The directory with the runtime's project and `overlays/`.
ROOT = Path(__file__).parents[1] if IS_CHECKOUT else SHIPPED
#: What builds overlays here: nox, in this repository, or this package, which another project has installed.
BUILT_BY = "nox" if IS_CHECKOUT else "ucm-overlay-tools"
#: The directory for outputs: the checkout's, or one in the current directory.
BUILD = ROOT / "build" if IS_CHECKOUT else Path("build")
SESSION = re.compile(r"nox -s ([a-z-]+)(?: --)?(?![\w-])")


def command(text: str) -> str:
    """Return a text with commands that exist where it is shown.

    Messages name this repository's nox sessions. Whoever installed the tooling's wheel has only the package
    that they call.
    """
    return text if IS_CHECKOUT else SESSION.sub(r"python -m transforms \1", text)
