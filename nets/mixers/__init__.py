"""Mixers: one file per mixer and the trajectory encoder that is built on it."""
