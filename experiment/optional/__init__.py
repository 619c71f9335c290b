"""Parts that a run has only if gin asks for them."""
