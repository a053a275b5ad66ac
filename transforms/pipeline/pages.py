"""HTML pages under `build/`, each self-contained and readable without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent / "templates" / "pages"


def write_page(target: Path, template: str, **context: Any) -> Path:
    """Render a page.

    Args:
        target: The file to write.
        template: A template beside the shared style and script.
        context: The template's variables.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(environment.get_template(template).render(context), encoding="utf-8")
    return target
