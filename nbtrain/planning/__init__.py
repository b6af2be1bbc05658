"""From a cell's text to a checked plan. Starts nothing."""
