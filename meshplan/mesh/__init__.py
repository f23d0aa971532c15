"""Axes and ranks: degrees, groups, links, process groups, agreement among ranks, and random streams."""
