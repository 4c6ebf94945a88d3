"""Questions about the cache, commands on it, and its events. Pure."""
