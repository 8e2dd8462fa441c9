"""The gateway process: every decision, the listening ports, the arena."""
