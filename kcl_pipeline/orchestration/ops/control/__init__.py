"""Jobs of an operator: pause, resume, drain, move, balance and seek."""
