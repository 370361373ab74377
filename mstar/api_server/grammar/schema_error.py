"""`SchemaError`: what a schema asks for that text cannot be held to."""


class SchemaError(ValueError):
    """A schema that text cannot be held to; `path` is where in it, like `.properties.name`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path
