"""The log of a Delta table: its entries and its application transactions."""
