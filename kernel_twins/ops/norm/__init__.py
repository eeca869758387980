"""The specs of norms of rows."""
