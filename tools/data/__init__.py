"""The command `loxodon data`, which shows, checks, converts and exchanges trajectory files."""
