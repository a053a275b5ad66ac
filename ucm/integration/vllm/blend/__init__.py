"""BlendConnector's two sides: selecting the chunks that a request reuses, and recomputing parts of them."""
