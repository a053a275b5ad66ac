"""The documentation site's additions to the pages in docs/: generated reference pages and a check of all links."""
