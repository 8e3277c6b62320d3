"""What shows how good a plan is: a lower bound of its moves, and the figures that use it."""
