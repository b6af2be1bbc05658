"""This host and this process: processors, GPUs, TPUs, files, text. Knows nothing of training."""
