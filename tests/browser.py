"""What the tests of pages in a real browser share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from tests.system import CHROMIUM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

Scheme = Literal["light", "dark"]
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NARROW, WIDE = (390, 844), (1400, 900)
VIEWS: list[tuple[tuple[int, int], Scheme]] = [(NARROW, "light"), (NARROW, "dark"), (WIDE, "light"), (WIDE, "dark")]
#: A function of JavaScript that returns the contrast of an element's text with what is behind it, as WCAG 2 defines it.
CONTRAST = """
(element) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
  const paint = (colour) => { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); };
  const read = () => {
    const channels = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2];
  };
  layers.forEach(paint);
  const behind = read();
  paint(getComputedStyle(element).color);
  const text = read();
  return (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05);
}
"""


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Start Chromium.

    Raises:
        NotJudgedError: There is none.
    """
    chromium = CHROMIUM.require()
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where there is a browser

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()
