"""OpenAI's routes: request schemas, their translation to and from the conductor's terms, and the responses."""
