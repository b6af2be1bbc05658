"""The changes of a run as code of an exported script."""
