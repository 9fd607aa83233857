"""The one error of the builder that reaches a user."""


class BuildError(ValueError):
    """A model cannot be read, quantized or built; one line that says what, where, and what would work."""
