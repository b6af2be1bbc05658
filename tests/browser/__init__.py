"""Tests in a real browser: `pytest tests/browser`."""
