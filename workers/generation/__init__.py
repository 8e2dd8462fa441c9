"""Text token by token: sequences join and leave between two steps. Worker only."""
