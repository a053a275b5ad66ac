"""What has moved in a release, also one never seen: every rule tried, every failure told."""
