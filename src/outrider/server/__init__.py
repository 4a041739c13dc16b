"""The OpenAI-compatible server: HTTP in front of any serving backend."""
