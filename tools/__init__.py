"""What people type: the command `loxodon` and everything behind it.

`main` and `arguments` import nothing heavy, so that --help and completion answer at once.
"""

if __name__ == "tools":
    raise ImportError(
        "Import this as 'loxodon.tools', not 'tools': a second copy would break isinstance and gin. "
        "Fix: run pip install -e . and import loxodon.tools."
    )
