"""Network definitions of built-in models."""
