"""Vector environments: N sequence environments behind one batched interface."""
