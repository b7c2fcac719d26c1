"""OpenAI-compatible server on the reference runtime; needs the extra `serve`."""
