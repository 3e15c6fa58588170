"""A package, so that ``tests.helpers`` is this one and not some other ``tests`` on the path."""
