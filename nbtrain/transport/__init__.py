"""How values, exceptions and weights get from one process to another.

`result_pickler` pickles what a rank returns, `exceptions` what it raises. `payload` is the
`torch.save` file with what a fresh process runs. Trained models and optimizers are safetensors
files (`weights`).
"""
