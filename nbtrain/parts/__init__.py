"""Features that can be taken away: delete a folder here, and its row in `nbtrain.part`."""
