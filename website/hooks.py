"""The hooks of mkdocs: add the generated pages, and check all links of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from website.links import broken_links
from website.reference import UndocumentedError, commands_page, settings_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGES = {"settings.md": settings_page, "commands.md": commands_page}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages generated from the code.

    Raises:
        PluginError: If the code lacks a description.
    """
    for name, make in PAGES.items():
        try:
            files.append(File.generated(config, name, content=make()))
        except UndocumentedError as error:
            raise PluginError(str(error)) from error
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Unescape the bars of code in tables: GitHub needs the backslash, and Python-Markdown shows it."""
    return re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        markdown,
        flags=re.MULTILINE,
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Check the links.

    Raises:
        PluginError: Naming every broken one.
    """
    broken = broken_links(Path(config.site_dir).resolve())
    if broken:
        raise PluginError("broken links:\n" + "\n".join(broken))
