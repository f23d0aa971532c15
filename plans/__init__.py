"""Shipped plans, one folder a model family, packaged as data of `meshplan.plans`."""
