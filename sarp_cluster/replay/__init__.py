"""Reads real traces, replays them against an index, and compares with an exact oracle."""
