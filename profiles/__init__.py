"""Measuring a cluster with the executor's own modules, and what earlier measurements shipped."""
