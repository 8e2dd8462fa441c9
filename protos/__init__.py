"""Public contracts and their committed stubs."""
