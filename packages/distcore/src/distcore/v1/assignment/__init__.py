"""Assignment: items shared out over ranks, and the parts that look for the best way to do it."""
