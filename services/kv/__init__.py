"""The cache can be asked: the routes under /kv/."""
