"""Quality of plans: a lower bound of moves, and metrics that use it."""
