"""What a worker measures and reports of itself."""
