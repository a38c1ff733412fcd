"""How evenly a router serves while others send it the worst that they can: `python -m bench.router`."""
