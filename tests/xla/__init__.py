"""What needs torch_xla: real XLA processes, on a TPU that is pretended."""
