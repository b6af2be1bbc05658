"""How a run is drawn: `board` and `text_summary` are pure; `displays` put it on a screen."""
