"""Optional parts of a run, used only if gin asks for them."""
