"""The cluster in simulated time: `hackkv simulate` and `hackkv plan`; and its nodes without weights, `sim.nodes`.

The decisions are the live cluster's own (placement, line, prefill and decode schedulers, page books, victims); only
durations come from a cost model and bytes from a network of fluid flows. Nothing but `app` imports this room.
"""
