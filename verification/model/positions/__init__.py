"""Models of the protocol that stores positions in the table; `scenarios` lists them."""
