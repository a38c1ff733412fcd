"""Writes the Grafana dashboards in deploy/grafana/dashboards."""
