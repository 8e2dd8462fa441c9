"""Stubs of the Open Inference Protocol."""
