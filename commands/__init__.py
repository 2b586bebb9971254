"""One file per command: its options, the call, what is printed.  Each imports what it needs when it runs."""
