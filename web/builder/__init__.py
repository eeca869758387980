"""The site's generator: what the measurements say, as pages that open from disk."""
