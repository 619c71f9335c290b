"""Reading and checking gin configurations before anything is built.

`source` reads files and overrides with gin's own parser and keeps where each binding came from, `registry` is
our view of what gin knows, `graph` finds what a config uses, `annotations` compares values with type hints,
`advice` puts types and mends into words, `problems` turns all of it into error texts, `render` prints the
resolved config. `..config` puts them in order.
"""
