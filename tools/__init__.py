"""The command-line tools: the command `loxodon` and its subcommands.

`main` and `arguments` have no heavy imports, so --help and completion respond at once.
"""

if __name__ == "tools":
    raise ImportError(
        "Import this as 'loxodon.tools', not 'tools': a second copy would break isinstance and gin. "
        "Fix: run pip install -e . and import loxodon.tools."
    )
