"""Drawing a run: `html` and `text` are pure; `fronts` chooses who puts it on which screen."""
