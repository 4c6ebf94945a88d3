"""The block pool and its structures: who is free, what is found, who holds. Pure."""
