"""Drawing a run: `html` and `text` are pure, `fronts` puts what they make on a screen."""
