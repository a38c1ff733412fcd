"""How evenly a router serves while some clients send it the worst that they can: `python -m bench.router`."""
