"""Pictures of Prometheus' own graphs for the docs."""
