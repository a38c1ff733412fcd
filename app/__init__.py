"""The application: the command `hackkv`, a cluster on one machine, and the demo."""
