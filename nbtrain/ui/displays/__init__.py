"""Shows a run on a screen: as a widget, as plain HTML, or in a terminal."""
