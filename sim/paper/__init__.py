"""The paper's evaluation beside a model of its hardware: `python -m sim.paper --out docs` writes docs/paper.md."""
