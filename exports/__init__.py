"""A plan in the words of other engines and launchers."""
