"""What changed: between any two, and since it was committed."""
