"""What the documentation site has beside the pages in docs/: generated reference pages and a check of all links."""
