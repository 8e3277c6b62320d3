"""The lease protocol as a state space that is searched to its end."""
