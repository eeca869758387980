"""Running ncu, and reading what it leaves."""
