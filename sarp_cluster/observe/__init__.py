"""What nodes tell about themselves: metrics and the time line."""
