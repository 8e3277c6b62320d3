"""A model of the lease protocol whose state space is searched exhaustively."""
