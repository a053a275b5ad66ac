"""BlendConnector's two sides: which chunks a request reuses, and the forward passes that fit them to their place."""
