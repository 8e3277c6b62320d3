"""Start, replace, drain and reconcile worker runs."""
