"""The tier below the pool: what it keeps (pure), and its file and copies."""
