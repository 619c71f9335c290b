"""`loxodon data`: look at trajectory files, check, convert and exchange them."""
