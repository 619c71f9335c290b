"""`loxodon benchmark`: suites of tasks, the runs of an agent on them, and a page that compares agents."""
