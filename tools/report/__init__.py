"""The command `loxodon report RUN...`, which makes one page about runs; it begins in main.py."""
