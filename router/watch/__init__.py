"""Observation: metrics, the journal of the page, accounts of time and bytes. It changes nothing."""
