"""Tests in a real browser: `pytest tests/ui/browser`."""
