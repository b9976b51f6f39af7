"""Tests of what the processes of a cluster agree on, and of the control plane."""
