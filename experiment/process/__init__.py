"""Process utilities: signals, exit statuses, threads, random generators, files, several ranks."""
