"""The decisions: who is let in, who starts where, who gives way, what a report changes. Pure."""
