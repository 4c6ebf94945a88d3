"""OpenAI's routes: what they take, how they answer, whole or as server-sent events."""
