"""The specs of dropout."""
