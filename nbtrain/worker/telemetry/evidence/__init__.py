"""What a rank sees of a training that goes wrong without an error, each time with its proof."""
