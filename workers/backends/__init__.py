"""How a version's weights run: one file a backend."""
