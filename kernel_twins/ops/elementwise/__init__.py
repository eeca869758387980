"""The specs of elementwise operations."""
