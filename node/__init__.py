"""What the processes of every role share: how one starts, says that it is ready, drains and ends."""
