"""What is seen from outside: metrics, the journal of the page, accounts of time and bytes. Changes nothing."""
