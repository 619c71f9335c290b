"""Presets as package data: one gin file per runnable experiment, plus small mix-ins."""

if __name__ == "gin_configs":
    raise ImportError(
        "Import this as 'loxodon.gin_configs', not 'gin_configs': a second copy would break isinstance and "
        "gin. Fix: run pip install -e . and import loxodon.gin_configs."
    )
