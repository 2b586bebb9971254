"""Pure functions from specs to seconds and bytes: numbers in, numbers out.  No torch, no solver, only data files."""
