"""Where UCM meets inference engines."""
