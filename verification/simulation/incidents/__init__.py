"""What happens to a simulated fleet: what a seed draws from, and the storm that makes it happen."""
