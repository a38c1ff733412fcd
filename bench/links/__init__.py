"""The parts of `bench.jct`: links of several speeds, a cluster behind one of them, and the page about all of them."""
