"""The log of a Delta table: its entries, its application transactions, its end."""
