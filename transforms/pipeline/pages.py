"""Templates, and HTML pages under `build/`, each self-contained and readable without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def templates(directory: Path = TEMPLATES, *, trim_blocks: bool = True, html: bool = False) -> jinja2.Environment:
    """Return the environment of some templates; a variable that a template uses and does not get is an error.

    Args:
        directory: The directory of the templates.
        trim_blocks: Whether a line with only a block tag leaves no line behind.
        html: Whether values are escaped for HTML. Python, TOML and Markdown get only words of our own or checked ones.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(directory),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=trim_blocks,
        lstrip_blocks=trim_blocks,
        autoescape=html,  # noqa: S701 - see `html`
    )


def write_page(target: Path, template: str, **context: Any) -> Path:
    """Render a page.

    Args:
        target: The file to write.
        template: A template beside the shared style and script.
        context: The template's variables.
    """
    page = templates(TEMPLATES / "pages", html=True).get_template(template).render(context)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target
