"""What the pages say of vLLM Ascend's patches: the attributes that it rebinds, and those that the example has moved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from transforms.place import ROOT

#: Releases of vLLM Ascend; the paired vLLM releases have the example's overlays.
RELEASES = ("0.23.0", "0.24.0rc1", "0.30.0rc1")
PAGE = ROOT / "docs" / "ascend_patches.md"


@dataclass(frozen=True)
class Rebinding:
    """One attribute of vLLM that a file of vLLM Ascend assigns.

    Attributes:
        path: The file.
        name: The attribute's dotted name.
        kind: A replacement, wrapper, subclass or value.
    """

    path: str
    name: str
    kind: str

    @property
    def patch(self) -> str:
        """The file's name, without its ending."""
        return Path(self.path).stem


def rebound(release: str) -> list[Rebinding]:
    """Return all that a release rebinds."""
    page = (ROOT / "docs" / "ascend_rebindings.md").read_text(encoding="utf-8")
    (section,) = (one for one in page.split("\n## ") if one.partition("\n")[0] == release)
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| `(\S+)`", section, re.MULTILINE)
    found = [Rebinding(path, name, kind) for name, kind, path in rows]
    for path, attributes in re.findall(r"^- `(\S+)`: (.*)$", section, re.MULTILINE):
        found += [Rebinding(path, name, kind) for name, kind in re.findall(r"`(\S+)` \((\w+)\)", attributes)]
    return found


def rows() -> list[tuple[str, str, str, str]]:
    """Return the moved attributes as the example's page names them: the patch, the attribute, since, until."""
    page = PAGE.read_text(encoding="utf-8")
    table = re.findall(r"^\| `(patch_\w+)` \| (.*?) \| (\S+), (\S+) \|", page, re.MULTILINE)
    return [(patch, name, *span) for patch, names, *span in table for name in re.findall(r"`(\S+)`", names)]


def moved(release: str) -> list[Rebinding]:
    """Return the rebindings of a release that the example has moved."""
    known, found = rebound(release), []
    for patch, name, since, until in rows():
        if RELEASES.index(since) <= RELEASES.index(release) <= RELEASES.index(until):
            same = {one for one in known if one.patch == patch and one.name.endswith(f".{name}")}
            assert len({one.kind for one in same}) == 1, (patch, name)
            found.append(min(same, key=lambda one: one.name))
    return found
