"""Tables, plots and timelines for people; nothing is computed here that a contract does not hold."""
