"""`kcl-pipeline doctor`: find what is wrong and say what to do."""
