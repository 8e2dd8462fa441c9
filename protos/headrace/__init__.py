"""Headrace's own contracts."""
