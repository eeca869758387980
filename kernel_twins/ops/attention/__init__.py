"""The specs of the attention family."""
