"""Asset checks: their definitions, and the functions that evaluate them."""
