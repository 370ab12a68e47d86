"""Helpers of the tests, themselves tested in ``tests/unit/kit``."""
