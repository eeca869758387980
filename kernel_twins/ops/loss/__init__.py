"""The specs of losses."""
