"""`hackkv plan`: what to buy for a load and an objective."""
