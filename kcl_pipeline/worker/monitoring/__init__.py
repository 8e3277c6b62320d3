"""Measurements and reports of a worker about itself."""
