"""`kcl-pipeline doctor`: find problems and advise how to correct them."""
