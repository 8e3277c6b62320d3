"""The default strategy: few moves to an even fleet."""
