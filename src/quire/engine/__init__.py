"""The engine: many requests in one batch, each with the bits that it has alone."""
