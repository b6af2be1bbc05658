"""How values, exceptions and weights travel between processes.

`result_pickler` pickles what a rank returns, `exceptions` what it raises; `payload` is the file of
`torch.save` that a fresh process runs; models and optimizers are safetensors files (`weights`).
"""
