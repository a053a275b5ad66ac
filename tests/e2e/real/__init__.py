"""A small trained model, a document to chat about, and its servers."""
