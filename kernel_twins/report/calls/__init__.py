"""The public functions as a user calls them, at cases of ours and at cases that nobody chose."""
