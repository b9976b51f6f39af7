"""Indexes of any size in the shape of a real one: templates, their replicas, and the snapshots made of them."""
