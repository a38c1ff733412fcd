"""The cluster in simulated time: `hackkv simulate`, `hackkv plan`, and nodes without weights (`sim.nodes`).

The decisions are the live cluster's own (placement, line, prefill and decode schedulers, page books, victims). Only
durations come from a cost model, and bytes from a network of fluid flows. Only `app` imports this folder.
"""
