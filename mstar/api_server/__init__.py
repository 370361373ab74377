"""HTTP: routes, OpenAI's protocol, server-sent events. Front process; reaches the conductor only through its handle."""
