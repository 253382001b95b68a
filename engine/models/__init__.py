"""Map of this package."""
