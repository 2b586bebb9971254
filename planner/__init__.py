"""Search for the best plan: dynamic programming, integer program, ladder, explanations.  No torch."""
