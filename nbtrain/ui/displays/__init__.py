"""Where a run is shown: widget, plain HTML, terminal."""
