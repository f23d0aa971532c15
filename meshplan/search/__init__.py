"""Choosing: the placements of a model on a given mesh, as an optimisation over its distinct layers."""
