"""The language that every room of the project shares: types, errors, configuration, codecs and the model."""

__version__ = "0.1.0"
