"""Contracts: models, clusters, profiles, plans, run logs, and the integer layout arithmetic they share.

This room imports nothing else of the project and no torch.
"""
