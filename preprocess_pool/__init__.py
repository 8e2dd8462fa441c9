"""The pool process: one job at a time, CPU only."""
